"""Noise on the GPU: the cipher, the distribution, the addition, and which key each call gets.

Receives: a CUDA device, or Triton's interpreter on the CPU where TRITON_INTERPRET=1 is set and Triton is installed.
Gives: the kernel against RFC 8439 and against its twin in plain torch; the rest needs neither device nor Triton.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from torch import Tensor

from clipwise import gpu_noise, randomness
from clipwise.gpu_noise import keystream, noisy_all
from clipwise.jit import constexpr, jit, tl
from clipwise.noise import release
from clipwise.randomness import SecureStream, SeededStream, Stream
from clipwise.types import InputError, Part, PoissonGaussian, PrivateSum, Refused

KEY, NONCE = bytes(range(32)), 7  # the key of RFC 8439's test vectors
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
SIZES = [1, 2, 3, 4, 5, 127, 513, 2049]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernel runs: the interpreter takes its time per program, so that there programs are larger."""
    if INTERPRETED:
        monkeypatch.setattr(gpu_noise, "_THREADS", 1 << 13)
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA, or TRITON_INTERPRET=1 and Triton")
    return "cuda"


def keystream_words(key: bytes, nonce: int, blocks: int) -> Tensor:
    """The twin: ChaCha20 in int64 arithmetic cut to 32 bits. [block, 16]."""
    packed = b"expand 32-byte k" + key + bytes(4) + nonce.to_bytes(12, "little")
    start = torch.frombuffer(bytearray(packed), dtype=torch.int32).long().repeat(blocks, 1) & 0xFFFFFFFF
    start[:, 12] = torch.arange(blocks)
    x = list(start.unbind(1))
    columns = [(i, 4 + i, 8 + i, 12 + i) for i in range(4)]
    diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    for a, b, c, d in 10 * (columns + diagonals):
        for to, add, turn, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[add]) & 0xFFFFFFFF
            mixed = x[turn] ^ x[to]
            x[turn] = (mixed << by | mixed >> (32 - by)) & 0xFFFFFFFF
    return (torch.stack(x, 1) + start) & 0xFFFFFFFF


EACH = {torch.float64: 4, torch.float32: 6}  # numbers that a block makes of results in this format


def normals(words: Tensor, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The twin's normals for results in this format: block b makes the numbers b + j · blocks. Float64."""
    if dtype == torch.float64:
        pairs = words.view(-1, 2, 4, 2)  # [block, number, draw's radius and angle, words]
        draws = [_draw(pairs[:, :, i], torch.zeros(1), pairs[:, :, 2 + i]) for i in (0, 1)]
        found = (draws[0] + draws[1]) / math.sqrt(2)
    else:
        found = torch.stack(
            [_draw(words[:, i : i + 2], words[:, i + 2], words[:, i + 3 : i + 5]) for i in (0, 5, 10)], 1
        )
    return found.flatten(1).T.reshape(-1)[:size]


def _draw(radius: Tensor, more: Tensor, angle: Tensor) -> Tensor:
    """r cos θ and r sin θ, with the library's functions: r of two words and more, θ of the low 53 bits of two words."""
    v = radius[..., 0].double() + radius[..., 1].double() * 2.0**32 + (more.double() + 0.5) * 2.0**-32
    turn = (angle[..., 0] | (angle[..., 1] & 0x1FFFFF) << 32).double() * 2.0**-53
    r = (-2 * (v * 2.0**-64).log()).sqrt()
    return torch.stack([r * torch.cos(2 * math.pi * turn), r * torch.sin(2 * math.pi * turn)], -1)


def noisy(value: Tensor, scale: float, key: bytes = KEY, nonce: int = NONCE) -> Tensor:
    (out,) = noisy_all([value], [scale], key, nonce)
    return out


def draw(device: str, size: int, dtype: torch.dtype = torch.float64, key: bytes = KEY, nonce: int = NONCE) -> Tensor:
    return noisy(torch.zeros(size, dtype=dtype, device=device), 1.0, key, nonce).cpu().double()


def unsigned(words: Tensor) -> Tensor:
    return words.cpu().long() & 0xFFFFFFFF


def test_the_kernel_s_keystream_is_that_of_rfc_8439_section_2_3_2(device: str) -> None:
    nonce = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
    block = keystream(KEY, nonce, 2, device)[1].cpu()  # the section's counter is 1
    assert block.numpy().tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("nonce", [0, 1, 1 << 40, (1 << 96) - 1])
def test_the_twin_s_keystream_is_the_cipher_s(nonce: int) -> None:
    cipher = Cipher(algorithms.ChaCha20(KEY, bytes(4) + nonce.to_bytes(12, "little")), mode=None)
    block = bytearray(cipher.encryptor().update(bytes(64 * 100)))
    assert torch.equal(unsigned(torch.frombuffer(block, dtype=torch.int32)), keystream_words(KEY, nonce, 100).view(-1))


@pytest.mark.parametrize("nonce", [0, 1, 1 << 40, (1 << 96) - 1])
@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, KEY])
def test_the_kernel_s_keystream_is_the_twin_s(device: str, key: bytes, nonce: int) -> None:
    assert torch.equal(unsigned(keystream(key, nonce, 300, device)), keystream_words(key, nonce, 300))


both_formats = pytest.mark.parametrize("dtype", EACH)


@both_formats
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_s_normals_are_the_twin_s(device: str, size: int, dtype: torch.dtype) -> None:
    expected = normals(keystream_words(KEY, NONCE, -(-size // EACH[dtype])), size, dtype).to(dtype).double()
    torch.testing.assert_close(draw(device, size, dtype), expected, rtol=1e-14, atol=1e-14)


@jit
def _write_draws(out: tl.tensor, words: tl.tensor, threads: constexpr) -> None:
    """Kernel: one draw from each row of five words."""
    i = tl.program_id(0) * threads + tl.arange(0, threads)
    row = words + 5 * i
    w0, w1 = tl.load(row).to(tl.uint32), tl.load(row + 1).to(tl.uint32)
    w2, w3, w4 = tl.load(row + 2).to(tl.uint32), tl.load(row + 3).to(tl.uint32), tl.load(row + 4).to(tl.uint32)
    one, other = gpu_noise._one_draw((w0, w1, w2, w3, w4), 0)
    tl.store(out + 2 * i, one)
    tl.store(out + 2 * i + 1, other)


def draws_of(rows: list[tuple[int, int, int]], device: str) -> Tensor:
    """The kernel's draws of chosen numbers, not the cipher's: 64 bits of a radius, 32 more, an angle. [row, 2]."""
    threads = gpu_noise._THREADS
    programs = -(-len(rows) // threads)
    words = torch.zeros(programs * threads, 5, dtype=torch.int64)
    low = 0xFFFFFFFF
    words[: len(rows)] = torch.tensor([[u & low, u >> 32, more, t & low, t >> 32] for u, more, t in rows])
    out = torch.empty(programs * threads, 2, dtype=torch.float64, device=device)
    _write_draws[(programs,)](out, words.to(device), threads)
    return out[: len(rows)].cpu()


def polar(u: int, more: int, t: int) -> tuple[float, float]:
    """A draw with all digits, also near 0: r = √(−2 ln u), u of 96 bits and a half, and of the angle the low 53."""
    whole = (u << 33) + 2 * more + 1  # u = whole/2⁹⁷
    near = (1 << 97) - whole
    # as the kernel takes it: rounded to 53 bits
    rounded = float(whole) / 2**97
    radius = math.sqrt(-2 * (math.log1p(-(1 - rounded)) if near < 1 << 96 else math.log(rounded)))
    t %= 1 << 53
    quarter = (t + (1 << 50)) >> 51
    angle = (t - (quarter << 51)) * (2 * math.pi / 2**53)
    x, y = radius * math.cos(angle), radius * math.sin(angle)
    return ((x, y), (-y, x), (-x, -y), (y, -x))[quarter % 4]


def assert_all_digits(found: Tensor, expected: Tensor) -> None:
    """Within 2e-15 of itself, also near 0; the interpreter fuses no product with its sum, and is coarser there."""
    radius = expected.square().sum(1, keepdim=True).sqrt()
    allowed = 2e-15 * expected.abs() + (2e-16 * radius if INTERPRETED else 0.0)
    assert bool(((found - expected).abs() <= allowed).all())


RADII = sorted(  # next to 0, to 1 and to every power of two below both, and where u passes √½ times one of them
    {(1 << j) + d for j in range(64) for d in (-1, 0, 1)}
    | {(1 << 64) - (1 << j) + d for j in range(64) for d in (-1, 0) if (1 << j) > d}
    | {int(math.sqrt(0.5) * (1 << j)) + d * step for j in range(40, 65) for d in (-1, 1) for step in (1, 1 << 22)}
)
TURNS = [((j << 50) + d) % (1 << 53) for j in range(8) for d in (-2, -1, 0, 1, 2)]  # next to every eighth


@pytest.mark.parametrize("above", [0, 0x7FF, 0x555])  # the bits of an angle above its 53
@pytest.mark.parametrize("more", [0, 1, 0xFFFFFFFF])
def test_radii_and_turns_have_all_digits_at_their_awkward_ends(device: str, above: int, more: int) -> None:
    high = above << 53
    pairs = [(u, TURNS[i % len(TURNS)]) for i, u in enumerate(RADII)] + [(u, t) for u in RADII[-3:] for t in TURNS]
    expected = torch.tensor([polar(u, more, t) for u, t in pairs], dtype=torch.float64)
    assert_all_digits(draws_of([(u, more, high | t) for u, t in pairs], device), expected)
    assert bool((draws_of([((1 << 64) - 1, more, high | t) for t in TURNS], device) == 0).all())
    quarters = draws_of([(u, more, high | (j << 51)) for u in RADII for j in range(4)], device)
    cosine, sine = quarters.view(len(RADII), 4, 2).unbind(2)
    assert bool((cosine[:, 1::2] == 0).all() and (sine[:, ::2] == 0).all())
    assert torch.equal(cosine[:, 0], -cosine[:, 2]) and torch.equal(sine[:, 1], -sine[:, 3])


def test_radii_and_turns_of_many_words_are_the_library_s(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 1 << 62, (1 << 15, 3), generator=generator).tolist()
    rows = [(4 * u + 1, more >> 30, t) for u, more, t in words]
    assert_all_digits(draws_of(rows, device), torch.tensor([polar(*row) for row in rows], dtype=torch.float64))


def test_the_largest_radius_is_far_beyond_what_occurs_and_small_ones_are_many(device: str) -> None:
    # the last of 96 bits: |z| < 11.6, beyond which a normal is with a probability of 4e-31
    assert 11.5 < float(draws_of([(0, 0, 0)], device)[0, 0]) < 11.6
    # far out, where u is below 2⁻⁴⁶, neighbours of 96 bits are closer to each other than any two results in float32
    tail = draws_of([(1 << 18, more, 0) for more in range(0, 1 << 20, 1 << 14)], device)[:, 0]
    steps = (tail[:-1] - tail[1:]) / (1 << 14)
    assert bool((steps > 0).all()) and float(steps.max()) < 0.01 * torch.finfo(torch.float32).eps * 8


@both_formats
def test_the_numbers_do_not_depend_on_the_program_s_size(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = draw(device, 999, dtype)
    monkeypatch.setattr(gpu_noise, "_THREADS", 32)
    assert torch.equal(draw(device, 999, dtype), large)


@both_formats
def test_normals_pass_kolmogorov_smirnov_and_their_moments_are_those_of_a_normal(
    device: str, dtype: torch.dtype
) -> None:
    count = 400_000
    values = draw(device, count, dtype)
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-6
    # five standard errors each; the key is fixed, so that the outcome is too
    assert abs(float(values.mean())) < 5 / math.sqrt(count)
    assert abs(float(values.var()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float((values**3).mean())) < 5 * math.sqrt(15 / count)
    assert abs(float((values**4).mean()) - 3) < 5 * math.sqrt(96 / count)
    assert stats.binomtest(int((values.abs() > 3.5).sum()), count, 2 * stats.norm.sf(3.5)).pvalue > 1e-6


@both_formats
def test_the_numbers_of_a_block_and_neighbours_are_not_correlated_nor_are_their_squares(
    device: str, dtype: torch.dtype
) -> None:
    values, blocks = draw(device, 50_000 * EACH[dtype], dtype), 50_000
    for lag in (1, *(j * blocks for j in range(1, EACH[dtype]))):
        for series in (values, (values**2 - 1) / math.sqrt(2)):
            pairs = series[:-lag] * series[lag:]
            assert abs(float(pairs.mean())) < 6 / math.sqrt(len(pairs))


def test_calls_with_another_key_or_nonce_are_independent_and_the_same_ones_repeat(device: str) -> None:
    first = draw(device, 40_000)
    assert torch.equal(draw(device, 40_000), first)
    for other in (draw(device, 40_000, nonce=NONCE + 1), draw(device, 40_000, key=bytes(32))):
        for power in (1, 2):
            correlation = float(torch.corrcoef(torch.stack([first**power, other**power]))[0, 1])
            assert abs(correlation) < 6 / math.sqrt(40_000)


@pytest.mark.parametrize("scale", [1e-30, 0.1, 3.0, 1e30])
def test_the_scale_keeps_all_its_digits(device: str, scale: float) -> None:
    value = torch.zeros(100, dtype=torch.float64, device=device)
    torch.testing.assert_close(noisy(value, scale, KEY, NONCE).cpu(), scale * draw(device, 100), rtol=1e-15, atol=0)


def test_noise_is_added_in_float64_and_only_the_noisy_sum_is_rounded(device: str) -> None:
    secret = 100 * torch.randn(1000, generator=torch.Generator().manual_seed(7))
    noise = 0.3 * normals(keystream_words(KEY, NONCE, 167), 1000, torch.float32)
    once, twice = (secret.double() + noise).float(), secret + noise.float()
    got = noisy(secret.to(device), 0.3, KEY, NONCE).cpu()
    assert got.dtype == torch.float32
    assert torch.equal(got, once) and not torch.equal(once, twice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (7, 11), (5, 3, 2)])
def test_shape_and_format_are_kept_and_the_secret_is_left_alone(
    device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    secret = torch.ones(shape, dtype=dtype, device=device)
    out = noisy(secret, 1.0, KEY, NONCE)
    assert out.shape == secret.shape and out.dtype == dtype and out.device == secret.device
    assert bool((secret == 1).all()) and bool((out != 1).all()) and bool(out.isfinite().all())


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_written_beyond_the_last_number(device: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room = torch.full((4 * size + 64,), 5.0, device=device)
    monkeypatch.setattr(torch, "empty", lambda count, **_: room[:count])
    noisy(torch.zeros(size, device=device), 1.0, KEY, NONCE)
    assert bool((room[size:] == 5).all()) and bool((room[:size] != 5).all())


def test_a_view_with_gaps_gets_the_noise_of_its_copy(device: str) -> None:
    whole = torch.arange(60.0, device=device).view(6, 10)
    for view in (whole[::2, 1::3], whole.T[::2], whole[:, 3], whole[0].expand(4, 10)):
        expected = noisy(view.clone().contiguous(), 2.0, KEY, NONCE)
        out = noisy(view, 2.0, KEY, NONCE)
        assert torch.equal(out, expected) and out.is_contiguous()


def layouts(device: str) -> dict[str, Tensor]:
    """Tensors that fill their memory, each in an order of its own, with numbers that tell their places apart."""
    whole = torch.arange(210.0, device=device)
    return {
        "contiguous": whole.view(2, 3, 5, 7),
        "channels last": whole.view(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "channels last, 3D": whole.view(1, 2, 3, 5, 7).to(memory_format=torch.channels_last_3d),
        "transposed": whole.view(14, 15).T,
        "axes turned": whole.view(5, 6, 7).permute(1, 2, 0),
        "an axis of one": whole.view(14, 15).T.as_strided((15, 1, 14), (1, 999, 15)),
        "within another": whole.view(14, 15)[3:8].T,
        "one of one": whole[5:].as_strided((1,), (7,)),
        "a row": whole[1:],
        "scalar": whole[3],
        "empty": whole[:0].view(3, 0, 2),
        "empty and transposed": whole[:0].view(3, 0).T,
    }


@pytest.mark.parametrize("name", layouts("cpu"))
def test_a_tensor_that_fills_its_memory_keeps_its_strides_and_gets_its_noise_in_memory_order(
    device: str, name: str
) -> None:
    value = layouts(device)[name]
    size = value.numel()
    inside = torch.as_strided(value, (size,), (1,))  # as it lies in memory
    z = normals(keystream_words(KEY, NONCE, -(-size // 6)), size, torch.float32)
    out = noisy(value, 2.0, KEY, NONCE)
    assert out.shape == value.shape and out.stride() == value.stride()
    expected = (inside.cpu().double() + 2.0 * z).float()
    torch.testing.assert_close(out.as_strided((size,), (1,)).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_tensors_keep_their_strides_and_each_gets_what_its_memory_would_get(
    device: str, dtype: torch.dtype
) -> None:
    gaps = torch.arange(60.0, device=device).view(6, 10)[::2, 1::3]
    values = [gaps, *layouts(device).values(), gaps]
    scales = [0.5 + i for i in range(len(values))]
    found = noisy_all(values, scales, KEY, NONCE, 4.0, dtype)
    given = [gaps.contiguous(), *values[1:-1], gaps.contiguous()]
    inside = [value.as_strided((value.numel(),), (1,)) for value in given]
    expected = noisy_all(inside, scales, KEY, NONCE, 4.0, dtype)
    for out, value, flat in zip(found, given, expected, strict=True):
        assert out.shape == value.shape and out.stride() == value.stride() and out.dtype == dtype
        assert torch.equal(out.as_strided(flat.shape, (1,)), flat)
    addresses = sorted((out.data_ptr(), out.numel() * out.element_size()) for out in found if out.numel())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(addresses))  # no number is written twice


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((), (), True),
        ((4,), (1,), True),
        ((4,), (2,), False),
        ((1,), (9,), True),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (1, 3), False),  # a gap
        ((2, 3), (1, 1), False),  # overlaps, with fewer places than numbers
        ((2, 3), (0, 1), False),
        ((2, 1, 3), (3, 0, 1), True),
        ((4, 3, 2, 2), (12, 1, 6, 3), True),
        ((4, 3, 2, 2), (24, 1, 6, 3), False),
    ],
)
def test_a_tensor_is_dense_where_it_fills_its_memory_with_each_number_once(
    shape: tuple[int, ...], strides: tuple[int, ...], dense: bool
) -> None:
    assert gpu_noise._dense(shape, strides) == dense


def test_the_key_does_not_stay_on_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    original = torch.frombuffer

    class Kept:
        def __init__(self, host: Tensor) -> None:
            self.host = host

        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            kept.append(self.host.to(*args, **kwargs))
            return kept[-1]

    monkeypatch.setattr(torch, "frombuffer", lambda *args, **kwargs: Kept(original(*args, **kwargs)))
    draw(device, 10)
    assert len(kept) == 1 and len(kept[0]) == 64 + 48 and not bool(kept[0].any())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_graph_which_would_repeat_its_noise_is_refused() -> None:
    value = torch.zeros(10, device="cuda")
    noisy(value, 1.0, KEY, NONCE)
    with pytest.raises(Refused, match="outside the graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        noisy(value, 1.0, KEY, NONCE)


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_noise, "triton", None)
    with pytest.raises(InputError, match="pip install triton"):
        noisy(torch.zeros(3), 1.0, KEY, NONCE)


class OnCuda(Tensor):
    """A tensor that says it is on CUDA, to see where it is sent on a machine that has none."""

    is_cuda = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bytes, int]]:
    """Scale, key and nonce of every call of the kernel, which adds nothing."""
    made: list[tuple[float, bytes, int]] = []

    def record(values: list[Tensor], scales: list[float], key: bytes, nonce: int, *_: object) -> list[Tensor]:
        made.extend((scale, key, nonce) for scale in scales)
        return [value.clone() for value in values]

    monkeypatch.setattr(gpu_noise, "noisy_all", record)
    return made


def test_every_cuda_tensor_of_a_secure_stream_has_a_fresh_key(calls: list[tuple[float, bytes, int]]) -> None:
    stream = SecureStream()
    for step in range(3):
        stream.noisy_all([torch.zeros(2).as_subclass(OnCuda)], [1.0])
        stream.at(step).noisy_all([torch.zeros(2).as_subclass(OnCuda)], [1.0])
    assert len({key for _, key, _ in calls}) == 6 and all(len(key) == 32 for _, key, _ in calls)


def test_cuda_tensors_of_a_seeded_stream_repeat_with_seed_and_step_and_share_no_nonce(
    calls: list[tuple[float, bytes, int]],
) -> None:
    value = torch.zeros(2).as_subclass(OnCuda)
    streams = [SeededStream(1), SeededStream(1).at(0), SeededStream(1).at(1), SeededStream(2).at(0)]
    for stream in (*streams, SeededStream(1).at(1)):
        for _ in range(3):
            stream.noisy_all([value], [1.0])
    assert calls[6:9] == calls[12:]  # the same seed and step
    others = {(key, nonce) for _, key, nonce in calls[:12]}
    assert len(others) == 12
    for use in (0, 1):  # the CPU's uniforms and normals are of another cipher, and of another key
        assert SeededStream(1).at(1)._next(use)[0] not in {key for key, _ in others}


def test_a_release_sends_all_cuda_tensors_to_one_launch_and_the_rest_keeps_its_numbers(
    calls: list[tuple[float, bytes, int]],
) -> None:
    here, there = torch.ones(3, 2), torch.ones(4).as_subclass(OnCuda)
    parts = (Part({"a": there, "b": here}, 0.5, 0.25), Part({"c": there, "d": torch.tensor(2.0)}, 3.0, 0.75))
    released = release(PrivateSum(parts), PoissonGaussian(2.0, 0.1), SeededStream(5)).gradient
    scales = [2.0 * 0.5 / math.sqrt(0.25), 2.0 * 3.0 / math.sqrt(0.75)]
    assert [scale for scale, _, _ in calls] == scales and len({(key, nonce) for _, key, nonce in calls}) == 1
    noise = SeededStream(5).normal([7], narrow=True)
    assert set(released) == set("abcd")
    assert torch.equal(released["b"], (here.double() + scales[0] * noise[:6].view(3, 2)).float())
    assert torch.equal(released["d"], (2.0 + scales[1] * noise[6]).float())


def test_gradients_and_counts_on_cuda_keep_their_names_and_scales_and_draw_nothing_on_the_cpu(
    calls: list[tuple[float, bytes, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(randomness.Stream, "_normals")
    one, two, three = (torch.full((4,), i).as_subclass(OnCuda) for i in (1.0, 2.0, 3.0))
    parts = (
        Part({"a": one, "b": two}, 0.5, 0.25),
        Part({"a": three}, 0.5, 0.5, is_count=True),
        Part({"c": three}, 3.0, 0.25),
    )
    released = release(PrivateSum(parts), PoissonGaussian(2.0, 0.1), SecureStream(), divisor=4.0)
    assert [scale for scale, _, _ in calls] == [2.0, 2.0, 12.0, 1.0 / math.sqrt(0.5)]
    assert len({key for _, key, _ in calls}) == 2  # gradients and counts: each its own launch
    assert {name: float(value[0]) for name, value in released.gradient.items()} == {"a": 1, "b": 2, "c": 3}
    assert {name: float(value[0]) for name, value in released.counts.items()} == {"a": 3}
    assert released.deviation == {"a": 0.5, "b": 0.5, "c": 3.0}


@pytest.mark.parametrize("stream", [SeededStream(3), SecureStream()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_the_cpu_a_stream_s_noise_is_its_normals_added_in_float64(stream: Stream, dtype: torch.dtype) -> None:
    value = torch.full((40, 50), 3.0, dtype=dtype)
    private = PrivateSum((Part({"w": value}, 0.5, 1.0),))
    out = release(private, PoissonGaussian(1.0, 0.1), stream).gradient["w"]
    assert out.dtype == dtype and out.shape == value.shape and bool((value == 3).all())
    if dtype != torch.bfloat16:  # whose rounding shows in the distribution
        # a secure stream draws afresh in each run
        assert stats.kstest((out.double().flatten() - 3).numpy() / 0.5, "norm").pvalue > 1e-9
    if isinstance(stream, SeededStream):
        expected = value.double() + 0.5 * SeededStream(3).at(2).normal([40, 50], narrow=dtype != torch.float64)
        out = release(private, PoissonGaussian(1.0, 0.1), SeededStream(3).at(2)).gradient["w"]
        assert torch.equal(out, expected.to(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_stream_s_noise_on_cuda_is_normal_and_stays_there() -> None:
    value = torch.full((200, 500), 3.0, device="cuda")
    draws = [SecureStream().noisy_all([value], [0.5])[0] for _ in range(2)]
    assert all(out.is_cuda and out.shape == value.shape for out in draws) and not torch.equal(*draws)
    for out in draws:
        assert stats.kstest((out.double().flatten().cpu() - 3).numpy() / 0.5, "norm").pvalue > 1e-9
    first, again, other = (SeededStream(3).at(step).noisy_all([value], [0.5])[0] for step in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_tensors_get_the_twin_s_noise_each_from_blocks_of_its_own(device: str, dtype: torch.dtype) -> None:
    threads = gpu_noise._THREADS
    each = EACH[dtype]
    sizes = [1, 0, 5, each * threads, each * threads + 1, 3, 700]
    values = [torch.arange(size, dtype=dtype, device=device) for size in sizes]
    scales = [0.5 + i for i in range(len(sizes))]
    found = noisy_all(values, scales, KEY, NONCE)
    first = 0
    words = keystream_words(KEY, NONCE, threads * sum(-(-size // (each * threads)) for size in sizes))
    for size, scale, out in zip(sizes, scales, found, strict=True):
        blocks = -(-size // each)
        z = normals(words[first : first + blocks], size, dtype)
        expected = (torch.arange(size, dtype=torch.float64) + scale * z).to(dtype)
        close = 1e-13 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(out.cpu(), expected, rtol=close, atol=close)
        first += -(-blocks // threads) * threads
    assert all(
        torch.equal(value.cpu(), torch.arange(size, dtype=dtype)) for value, size in zip(values, sizes, strict=True)
    )


def test_many_tensors_are_divided_and_rounded_once_to_another_format(device: str) -> None:
    sizes, divisor = [3, 513, 1], 7.0
    values = [torch.arange(size, dtype=torch.float64, device=device) for size in sizes]
    found = noisy_all(values, [0.5, 2.0, 1.0], KEY, NONCE, divisor, torch.float32)
    whole = noisy_all([value.float() for value in values], [0.5, 2.0, 1.0], KEY, NONCE)
    for one, other in zip(whole, found, strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(other, one / divisor, rtol=2e-7, atol=1e-7)
    words = keystream_words(KEY, NONCE, 1)
    once = ((torch.arange(3).double() + 0.5 * normals(words, 3, torch.float32)) / divisor).float()
    assert torch.equal(found[0].cpu(), once)


def test_many_tensors_of_several_formats_or_without_a_scale_each_are_an_input_error() -> None:
    for values, scales in (([torch.zeros(2), torch.zeros(2).double()], [1.0, 1.0]), ([torch.zeros(2)], [1.0, 2.0])):
        with pytest.raises(InputError, match="one format and device"):
            noisy_all(values, scales, KEY, NONCE)


LONG = torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"values": [torch.zeros(3, dtype=torch.bfloat16)] * 2}, "float32 or float64"),
        ({"values": [torch.zeros(3, dtype=torch.long)] * 2}, "float32 or float64"),
        ({"values": [LONG.expand((1 << 34) + 1)], "scales": [1.0]}, "several calls"),
        ({"values": [torch.zeros(3).double(), LONG.expand((1 << 34) + 1)]}, "several calls"),
        ({"values": [LONG.expand(1 << 33)] * 2 + [LONG], "scales": [1.0] * 3}, "several calls"),
        ({"values": [LONG.float().expand(6 << 32), LONG.float()]}, "several calls"),
        ({"scales": [1.0, 0.0]}, "scale"),
        ({"scales": [1.0, math.nan]}, "scale"),
        ({"scales": [-1.0, 1.0]}, "scale"),
        ({"scales": [1.0, "1"]}, "scale"),
        ({"divisor": 0.0}, "divisor"),
        ({"key": bytes(31)}, "32 bytes"),
        ({"nonce": -1}, "nonce"),
        ({"nonce": 1 << 96}, "nonce"),
    ],
)
def test_bad_input_is_an_input_error(wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"values": [torch.zeros(3), torch.zeros(2)], "scales": [1.0, 2.0], "key": KEY, "nonce": NONCE}
    with pytest.raises(InputError, match=message):
        noisy_all(**{**given, **wrong})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_release_of_channels_last_sums_on_cuda_keeps_their_strides() -> None:
    value = torch.zeros(8, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    private = PrivateSum((Part({"w": value, "b": torch.zeros(8, device="cuda")}, 1.0, 1.0),))
    released = release(private, PoissonGaussian(1.0, 0.1), SecureStream(), 2.0).gradient
    assert released["w"].stride() == value.stride() and bool((released["w"] != 0).all())
