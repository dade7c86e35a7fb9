"""Streams of random numbers: the cipher, the distribution, and what repeats."""

from __future__ import annotations

import math
import os
import threading
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from clipwise import cpu_noise, randomness
from clipwise.randomness import SecureStream, SeededStream, Stream, keystream
from clipwise.types import InputError

# Test case 16 of the specification of GCM (McGrew & Viega 2005): its ciphertext is the plaintext and the keystream
KEY, NONCE = bytes.fromhex(2 * "feffe9928665731c6d6a8f9467308308"), bytes.fromhex("cafebabefacedbaddecaf888")
PLAINTEXT = bytes.fromhex(
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
)
CIPHERTEXT = bytes.fromhex(
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
)


@pytest.fixture(params=randomness._MODES, ids=["gcm", "ctr"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way to the keystream, whichever is the faster one here."""
    monkeypatch.setattr(randomness, "_faster", lambda: request.param)


@pytest.fixture(params=["secure", "seeded"])
def stream(request: pytest.FixtureRequest) -> Stream:
    """Each stream, new for each test."""
    return SecureStream() if request.param == "secure" else SeededStream(1)


def test_the_keystream_is_that_of_the_specification_s_test_cases_13_and_16(mode: None) -> None:
    block = bytearray(16)
    keystream(bytes(32), bytes(12), memoryview(block))  # of zeros: the cipher's own output at counter 2
    assert block.hex() == "cea7403d4d606b6e074ec5d3baf39d18"
    stream = bytearray(len(PLAINTEXT))
    keystream(KEY, NONCE, memoryview(stream))
    assert bytes(a ^ b for a, b in zip(stream, PLAINTEXT, strict=True)) == CIPHERTEXT


def test_the_keystream_is_aes_of_a_counter_to_the_end_of_a_block(mode: None) -> None:
    stream = bytearray(len(randomness._ZEROS))
    keystream(KEY, NONCE, memoryview(stream))
    last = NONCE + (len(stream) // 16 + 1).to_bytes(4, "big")
    assert stream[-16:] == Cipher(algorithms.AES256(KEY), modes.ECB()).encryptor().update(last)


def test_the_oldest_cryptography_that_is_asked_for_can_write_a_keystream_over_its_own_length() -> None:
    # 42 raised ValueError for AES's counter mode at the first draw: it wanted 15 bytes more room than it writes
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert "cryptography>=43" in project["dependencies"]


def test_uniforms_are_the_low_53_bits_of_the_keystream() -> None:
    stream = SeededStream(3)
    key, nonce = SeededStream(3)._next(use=0)
    words = bytearray(8 * 100)
    keystream(key, nonce, memoryview(words))
    expected = [(int.from_bytes(words[i : i + 8], "little") & ((1 << 53) - 1)) / 2**53 for i in range(0, 800, 8)]
    assert stream.uniform(100).tolist() == expected


either = pytest.mark.parametrize("narrow", [False, True])  # two draws for each number, or one
# A secure stream draws afresh in each run. Some forty things are looked at of it, each of which is as far off as this,
# or by 6 standard errors, in two or three of a billion runs: something fails in one of ten million.
SELDOM = 1e-9


@either
def test_normals_pass_kolmogorov_smirnov_and_their_moments_are_those_of_a_normal(stream: Stream, narrow: bool) -> None:
    count = 400_000  # several blocks, the last one not full
    values = stream.normal([count], narrow)
    assert stats.kstest(values[:100_000].numpy(), "norm").pvalue > SELDOM
    assert abs(float(values.mean())) < 6 / math.sqrt(count)
    assert abs(float(values.var()) - 1) < 6 * math.sqrt(2 / count)
    assert abs(float((values**3).mean())) < 6 * math.sqrt(15 / count)
    assert abs(float((values**4).mean()) - 3) < 6 * math.sqrt(96 / count)


@either
def test_the_tails_of_the_normals_hold_what_they_should(stream: Stream, narrow: bool) -> None:
    count = 2_000_000
    beyond = int((stream.normal([count], narrow).abs() > 3.5).sum())
    assert stats.binomtest(beyond, count, 2 * stats.norm.sf(3.5)).pvalue > SELDOM


@either
@pytest.mark.parametrize("lag", [1, 2, 8, 1 << 15, 1 << 16, 1 << 17])
def test_normals_and_their_squares_are_not_correlated_at_a_distance(stream: Stream, lag: int, narrow: bool) -> None:
    # 2¹⁶ is the distance between the sine and the cosine of one pair, 2¹⁷ the length of a block
    values = stream.normal([400_000], narrow)
    for series in (values, (values**2 - 1) / math.sqrt(2)):
        pairs = series[:-lag] * series[lag:]
        assert abs(float(pairs.mean())) < 6 / math.sqrt(len(pairs))


def test_uniforms_are_uniform_in_the_half_open_interval(stream: Stream) -> None:
    values = stream.uniform(200_000)
    assert values.dtype == torch.float64 and float(values.min()) >= 0 and float(values.max()) < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > SELDOM
    assert bool((values * 2**53 == (values * 2**53).floor()).all())
    odd = int(((values * 2**53).long() & 1).sum())  # the lowest bit is random too
    assert stats.binomtest(odd, len(values), 0.5).pvalue > SELDOM


@either
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_normals_are_finite_at_the_ends_of_the_uniforms(
    byte: int, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(key: bytes, nonce: bytes, into: memoryview) -> None:
        into[:] = bytes([byte]) * len(into)

    monkeypatch.setattr("clipwise.randomness.keystream", constant)
    values = SecureStream().normal([9], narrow)
    largest = math.sqrt(2 * 96 * math.log(2)) if narrow else math.sqrt(2) * math.sqrt(2 * 53 * math.log(2))
    assert bool(values.isfinite().all()) and float(values.abs().max()) <= largest * (1 + 1e-12)


def test_a_normal_sums_two_box_muller_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    radii, angles = [0.3, 0.8], [0.1, 0.45]
    numbers = [*(int(u * 2**53) for u in radii), *(int(v * 2**64) for v in angles)]  # an angle is a whole word
    words = b"".join(number.to_bytes(8, "little") for number in numbers)

    def fixed(key: bytes, nonce: bytes, into: memoryview) -> None:
        into[:] = words

    monkeypatch.setattr("clipwise.randomness.keystream", fixed)
    lengths = [math.sqrt(-2 * math.log(1 - u)) for u in radii]
    cosine = sum(r * math.cos(2 * math.pi * v) for r, v in zip(lengths, angles, strict=True)) / math.sqrt(2)
    sine = sum(r * math.sin(2 * math.pi * v) for r, v in zip(lengths, angles, strict=True)) / math.sqrt(2)
    assert SecureStream().normal([2]).tolist() == pytest.approx([cosine, sine], rel=1e-12)


def test_normals_are_what_box_muller_says_to_the_last_digits() -> None:
    stream, half = SeededStream(2), 5000
    words = bytearray(8 * 4 * half)
    keystream(*SeededStream(2)._next(use=1), memoryview(words))
    numbers = [int.from_bytes(words[i : i + 8], "little") for i in range(0, len(words), 8)]
    lengths = [math.sqrt(-2 * math.log(1 - (number & ((1 << 53) - 1)) / 2**53)) for number in numbers[: 2 * half]]
    angles = [2 * math.pi * ((number + 2**63) % 2**64 - 2**63) / 2**64 for number in numbers[2 * half :]]
    for part, wave in zip(stream.normal([2 * half]).split(half), (math.cos, math.sin), strict=True):
        draws = [length * wave(angle) for length, angle in zip(lengths, angles, strict=True)]
        expected = [(a + b) / math.sqrt(2) for a, b in zip(draws[:half], draws[half:], strict=True)]
        assert max(abs(a - b) for a, b in zip(part.tolist(), expected, strict=True)) < 1e-14


@pytest.mark.parametrize("count", [10_000, 9_999, 1])
def test_normals_that_will_be_rounded_are_one_draw_each_to_the_last_digits(count: int) -> None:
    half = (count + 1) // 2
    words = bytearray(20 * half)
    keystream(*SeededStream(2)._next(use=1), memoryview(words))
    numbers = [int.from_bytes(words[i : i + 8], "little") for i in range(0, 16 * half, 8)]
    more = [int.from_bytes(words[i : i + 4], "little") for i in range(16 * half, 20 * half, 4)]
    uniforms = [
        ((2 * (number % 2**63) << 32) + 2 * rest + 1) / 2**96 for number, rest in zip(numbers[:half], more, strict=True)
    ]
    lengths = [math.sqrt(-2 * math.log(uniform)) for uniform in uniforms]
    angles = [2 * math.pi * ((number + 2**52) % 2**53 - 2**52) / 2**53 for number in numbers[half:]]
    expected = [r * wave(a) for wave in (math.cos, math.sin) for r, a in zip(lengths, angles, strict=True)]
    found = SeededStream(2).normal([count], narrow=True).tolist()
    assert max(abs(a - b) for a, b in zip(found, expected[:count], strict=True)) < 1e-14


def test_a_radius_far_out_is_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    radii = []
    for rest in (0, 1 << 20):

        def fixed(key: bytes, nonce: bytes, into: memoryview, rest: int = rest) -> None:
            into[:] = (1 << 17).to_bytes(8, "little") + bytes(8) + rest.to_bytes(4, "little")  # u = 2⁻⁴⁶ and more

        monkeypatch.setattr("clipwise.randomness.keystream", fixed)
        radii.append(float(SecureStream().normal([1], narrow=True)))
    # 2²⁰ of its radii lie closer together than two numbers of float32 do
    assert 7.9 < radii[1] < radii[0] < 8 and radii[0] - radii[1] < torch.finfo(torch.float32).eps * 4


def test_the_numbers_do_not_depend_on_how_many_threads_draw_them() -> None:
    before = torch.get_num_threads()
    draws = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            stream = SeededStream(4)
            draws.append(torch.cat([stream.normal([1 << 20]), stream.normal([100_001], narrow=True)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


def test_a_keystream_longer_than_a_block_is_an_error_and_not_left_half_written() -> None:
    with pytest.raises(ValueError, match="at most"):
        keystream(bytes(32), bytes(12), memoryview(bytearray((1 << 21) + 1)))


def test_no_two_blocks_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def noted(key: bytes, nonce: bytes, into: memoryview) -> None:
        seen.append((key, nonce))
        keystream(key, nonce, into)

    monkeypatch.setattr("clipwise.randomness.keystream", noted)
    for stream in (SecureStream(), SeededStream(4), SeededStream(4).at(0)):
        stream.normal([200_000])
        stream.uniform(200_000)
        stream.normal([1])
    assert len(seen) == len(set(seen)) == 3 * (2 + 2 + 1)  # 2¹⁷ numbers a key


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (65_537,), (131_073,)])
def test_normals_have_the_shape_asked_for(stream: Stream, shape: tuple[int, ...]) -> None:
    values = stream.normal(shape)
    assert tuple(values.shape) == shape and values.dtype == torch.float64 and bool(values.isfinite().all())
    assert len(stream.uniform(0)) == 0


def test_numbers_are_on_the_cpu_whatever_device_is_the_default(stream: Stream) -> None:
    with torch.device("meta"):
        assert stream.normal([3]).device.type == stream.uniform(3).device.type == "cpu"


def test_two_secure_streams_differ_and_no_block_comes_back() -> None:
    a, b = SecureStream(), SecureStream()
    assert len({float(stream.normal([1])) for stream in (a, b, a, b, a.at(1), a.at(1))}) == 6
    assert len(a.uniform(200_000).unique()) > 199_990  # of 2⁵³, two are the same once in 450,000 times


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_draws_other_numbers() -> None:
    stream = SecureStream()
    stream.normal([4])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, stream.normal([4]).numpy().tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 32)
    assert len(theirs) == 32 and theirs != stream.normal([4]).numpy().tobytes()
    os.close(read)
    os.close(write)


def test_a_seeded_stream_repeats_and_another_seed_differs() -> None:
    assert torch.equal(SeededStream(5).normal([1000]), SeededStream(5).normal([1000]))
    assert torch.equal(SeededStream(5).uniform(1000), SeededStream(5).uniform(1000))
    assert not torch.equal(SeededStream(5).normal([1000]), SeededStream(6).normal([1000]))
    stream = SeededStream(5)
    assert not torch.equal(stream.normal([1000]), stream.normal([1000]))


def test_a_step_repeats_on_resume_and_differs_from_other_steps() -> None:
    stream = SeededStream(5)
    before = [stream.at(step).normal([10]) for step in range(4)]
    stream.normal([10])  # what was drawn meanwhile does not matter
    resumed = [SeededStream(5).at(step).normal([10]) for step in (2, 3)]
    assert torch.equal(resumed[0], before[2]) and torch.equal(resumed[1], before[3])
    draws = {tuple(stream.at(step).uniform(2).tolist()) for step in range(2000)} | {tuple(stream.uniform(2).tolist())}
    assert len(draws) == 2001
    assert stream.at(3).at(2).uniform(1) == stream.at(2).uniform(1)


def test_uniforms_and_normals_of_a_step_do_not_depend_on_their_order_or_on_each_other() -> None:
    first, second = SeededStream(5).at(1), SeededStream(5).at(1)
    uniforms, normals = first.uniform(10_000), first.normal([10_000])
    assert torch.equal(second.normal([10_000]), normals) and torch.equal(second.uniform(10_000), uniforms)
    for values in (normals, normals**2):  # the squares would tell if radii came from these uniforms
        assert abs(float(torch.corrcoef(torch.stack([uniforms, values]))[0, 1])) < 5 / math.sqrt(10_000)


def test_streams_say_their_names_and_refuse_a_bad_seed() -> None:
    assert SecureStream().name == "AES-256-CTR, on CUDA ChaCha20" and SeededStream(7).at(3).name == "seeded(7)"
    for seed in (-1, 0.5, True):
        with pytest.raises(InputError, match="seed must be a whole number"):
            SeededStream(seed)  # type: ignore[arg-type]


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Noise by compiled code, and by PyTorch's operations."""
    if request.param == "plain":
        monkeypatch.setattr(cpu_noise, "_add", None)
    elif not cpu_noise.built():
        pytest.skip("needs a C compiler when clipwise is installed")
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_is_added_a_block_at_a_time_to_tensors_that_begin_and_end_anywhere(way: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (300, 800), (0,), (), (131_072,), (3, 5)]
    values = [torch.randn(size, generator=generator).to(dtype) for size in shapes]
    values[1] = values[1].T  # in another order than it lies in
    scales = [0.3, 0.3, 1.0, 5.0, 2.0, 0.1]
    found = SeededStream(6).noisy_all(values, scales, 7.0, torch.float32)
    noise = SeededStream(6).normal([sum(value.numel() for value in values)], narrow=True)
    for value, scale, own, noisy in zip(values, scales, noise.split([v.numel() for v in values]), found, strict=True):
        expected = ((value.double() + scale * own.view(value.shape)) / 7.0).float()
        # compiled, a sum may be rounded once less: to the next number, where it lies half way between two
        torch.testing.assert_close(noisy, expected, rtol=2.0**-23 if way == "compiled" else 0, atol=0)


@pytest.mark.parametrize("ends", [None, 0x00, 0xFF, 0x80])
def test_compiled_normals_are_the_plain_ones_to_the_last_digits(
    way: str, ends: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(key: bytes, nonce: bytes, into: memoryview) -> None:
        into[:] = bytes([ends or 0]) * len(into)

    if ends is not None:
        monkeypatch.setattr("clipwise.randomness.keystream", constant)
    count = 300_001
    normals = SeededStream(3).normal([count], narrow=True)
    # what is left of z − z, in float64 until it is rounded
    (left,) = SeededStream(3).noisy_all([-normals], [1.0], dtype=torch.float32)
    assert float(left.abs().max()) < 1e-14
    (noise,) = SeededStream(3).noisy_all([torch.zeros(count)], [1.0])
    torch.testing.assert_close(noise, normals.float(), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("openmp", [True, False])
def test_threads_share_the_blocks_and_every_number_is_written(
    way: str, openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipwise.randomness._BLOCK", 64)
    if not openmp:
        monkeypatch.setattr(cpu_noise, "_parallel", None)
    values, threads = [torch.zeros(9_999), torch.zeros(3)], torch.get_num_threads()
    try:
        found = []
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(torch.cat(SeededStream(8).noisy_all(values, [1.0, 2.0])))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found) and len(found[0].unique()) > 9_990
    if way == "compiled":
        monkeypatch.setattr(cpu_noise.Table, "add", lambda self, words, piece: 0)
        with pytest.raises(RuntimeError, match="noise was added to 0 of 10002 numbers"):
            SecureStream().noisy_all(values, [1.0, 2.0])


@pytest.mark.parametrize("openmp", [True, False])
def test_work_in_several_threads_is_that_of_several_and_raises_what_it_raised(
    openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not openmp:
        monkeypatch.setattr(cpu_noise, "_parallel", None)
    elif cpu_noise._parallel is None:
        pytest.skip("needs the OpenMP that PyTorch uses on Linux")
    together = threading.Barrier(3 if openmp else 1, timeout=60)
    seen: list[int] = []

    def work() -> None:
        together.wait()  # that all are there at once
        seen.append(threading.get_ident())

    cpu_noise.at_once(work, 3)
    assert len(set(seen)) == len(seen) == (3 if openmp else 1) and threading.get_ident() in seen

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cpu_noise.at_once(stopped, 3)


def test_compiled_code_reads_and_writes_only_what_is_there() -> None:
    if not cpu_noise.built():
        pytest.skip("needs a C compiler when clipwise is installed")
    table = cpu_noise.Table([torch.zeros(5)], [1.0], 1.0)
    for words, piece in ((14, slice(0, 5)), (15, slice(1, 6)), (15, slice(-1, 4)), (0, slice(2, 2))):
        with pytest.raises(ValueError, match="expected words for some of 5 numbers"):
            table.add(np.zeros(words, np.int32), piece)


def test_noisy_values_hold_no_graph_by_which_the_bare_ones_could_be_found() -> None:
    value = torch.ones(3, requires_grad=True)
    (noisy,) = SecureStream().noisy_all([2 * value], [1.0])
    assert not noisy.requires_grad and noisy.grad_fn is None
