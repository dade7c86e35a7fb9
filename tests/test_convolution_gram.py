"""The Gram form of a convolution's per-sample norms against every sample's gradient written in float64.

Receives: random convolutions of every geometry. On CUDA the kernels themselves run; so they do, slowly, on any machine
that has Triton when TRITON_INTERPRET=1 is set.
Gives: agreement to the format's rounding, and never a norm that is too small, also where positions cancel.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from clipwise.records.kernels import convolution_gram as form
from clipwise.records.kernels.convolution_gram import Tile, convolution_gram_sq_norm
from clipwise.records.kernels.convolution_tiles import Shape
from clipwise.types import InputError
from images import CUDA, DEVICE, INTERPRETED, Pair, images, kernel_runs

on_cuda = pytest.mark.skipif(not CUDA or form.triton is None, reason="needs CUDA")
HALF = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter knows no bfloat16

CLOSE = 1e-5 if DEVICE == "cpu" else 1e-4  # tensor cores may cut off what they add

Case = tuple[torch.Tensor, torch.Tensor, Pair, Pair, Pair, Pair]


def case(
    n: int,
    channels: int,
    size: Pair,
    outputs: int,
    kernel: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    dtype: torch.dtype = torch.float64,
) -> Case:
    """x and b with large and small samples, and the geometry in the operator's order."""
    x, b = images(n, channels, size, outputs, kernel, stride, padding, dilation)
    return x.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE), stride, padding, dilation, kernel


def reference(x, b, stride, padding, dilation, kernel) -> torch.Tensor:
    """Every sample's squared norm in float64, from the values as they were rounded: one weight gradient at a time."""
    x, b = x.double().cpu(), b.double().cpu()
    size = (b.shape[1], x.shape[1], *kernel)
    one = lambda i: torch.nn.grad.conv2d_weight(x[i : i + 1], size, b[i : i + 1], stride, padding, dilation)
    return torch.stack([one(i).square().sum() for i in range(len(x))])


def scale(x, b, stride, padding, dilation, kernel) -> torch.Tensor:
    """(Σ_s ‖a_s‖‖b_s‖)², to which rounding is relative where positions cancel."""
    patches = torch.nn.functional.unfold(x.double().cpu(), kernel, dilation, padding, stride)
    return (patches.square().sum(1).sqrt() * b.double().cpu().flatten(2).square().sum(1).sqrt()).sum(1).square()


def promised(*arguments) -> torch.Tensor:
    """The squared norm with what is added for rounding."""
    return reference(*arguments) + form.SLACK * scale(*arguments)


def launched(arguments: Case, tile: Tile) -> torch.Tensor:
    """The kernels, as the operator would start them with one tile."""
    x, b, *geometry = arguments
    x, b = form.rows(x), form.rows(b)
    shape = Shape.of(x.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2), *geometry, 1)
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN: what is read was written
    try:
        return form.launch(x, b, shape, tile).double().cpu()
    finally:
        torch.use_deterministic_algorithms(False)


def tiles_for(arguments: Case) -> list[Tile]:
    """Small tiles, of which a matrix has several, and one tile for all; on a GPU also what would be tried there."""
    x, b, *geometry = arguments
    inputs, positions = x.shape[2] * x.shape[3], b.shape[2] * b.shape[3]
    tiles = [Tile(16, 16, 16, 4, 2, fused=False), Tile(32, 16, 32, 4, 2, fused=False)]
    if max(inputs, positions) <= 64:
        whole, block = form.power(inputs, 16, 64), form.power(positions, 16, 64)
        tiles += [Tile(whole, block, 32, 4, 2, fused=True), Tile(16, block, 16, 4, 2, fused=False)]
    return tiles if INTERPRETED else tiles + form.candidates(Shape.of(x, b, *geometry, 1))


@st.composite
def cases(draw) -> Case:
    pair = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))
    kernel, dilation = pair(1, 4), pair(1, 3)
    padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
    least = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) for i in (0, 1)]
    size = (least[0] + draw(st.integers(0, 6)), least[1] + draw(st.integers(0, 6)))
    channels, outputs = pair(1, 5)
    return case(draw(st.integers(1, 4)), channels, size, outputs, kernel, pair(1, 3), padding, dilation)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_twin_gives_the_norm_of_the_written_gradient(arguments: Case) -> None:
    found, expected = convolution_gram_sq_norm(*arguments).cpu(), reference(*arguments)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


KERNEL_CASES = {  # sample, channel, size, output; kernel, stride, padding, dilation
    "3×3": (3, 16, (8, 8), 24, (3, 3), (1, 1), (1, 1)),
    "3×3, no padding": (2, 16, (8, 7), 16, (3, 3)),
    "odd channels": (2, 19, (6, 6), 13, (3, 3), (1, 1), (1, 1)),
    "stride 2": (2, 16, (9, 9), 32, (3, 3), (2, 2), (1, 1)),
    "stride 2, no padding": (2, 8, (12, 12), 8, (4, 4), (2, 2)),
    "5×5": (2, 8, (8, 8), 8, (5, 5), (1, 1), (2, 2)),
    "one by one": (2, 40, (5, 5), 70, (1, 1)),
    "one by one, stride 2": (2, 8, (6, 7), 8, (1, 1), (2, 2)),
    "dilated": (2, 8, (9, 9), 8, (3, 3), (1, 1), (2, 2), (2, 2)),
    "oblong, all different": (2, 5, (12, 9), 7, (3, 2), (1, 2), (2, 1), (2, 3)),
    "wide padding": (2, 8, (3, 3), 8, (3, 3), (1, 1), (3, 3)),
    "one position": (2, 8, (3, 3), 33, (3, 3)),
    "one position of x": (2, 8, (1, 1), 16, (3, 3), (1, 1), (1, 1)),
    "as many positions as there may be": (1, 8, (16, 16), 8, (3, 3), (1, 1), (1, 1)),
}


@kernel_runs
@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("dtype", HALF)
def test_the_kernels_agree_with_float64_for_every_tile(name: str, dtype: torch.dtype) -> None:
    arguments = case(*KERNEL_CASES[name], dtype=dtype)
    expected = promised(*arguments)
    for tile in tiles_for(arguments):
        torch.testing.assert_close(
            launched(arguments, tile), expected, rtol=CLOSE, atol=0, msg=lambda text, t=tile: f"{t}: {text}"
        )


@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_operator_gives_float32_on_any_device(name: str, dtype: torch.dtype) -> None:
    arguments = case(*KERNEL_CASES[name], dtype=dtype)
    found = convolution_gram_sq_norm(*arguments)
    assert found.dtype == torch.float32 and found.device == arguments[0].device
    torch.testing.assert_close(found.double().cpu(), promised(*arguments), rtol=CLOSE, atol=0)


def cancelling(dtype: torch.dtype) -> Case:
    """Every patch alike, and output gradients that add up to almost nothing, or to exactly nothing."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(8, 40, 1, 1, generator=random).expand(8, 40, 8, 8).to(dtype)
    b = torch.randn(8, 24, 3, 6, generator=random).to(dtype)
    b = torch.cat([b, -b * torch.where(torch.arange(8) < 4, 1, 1 + 2.0**-6).to(dtype).reshape(8, 1, 1, 1)], 2)
    return x.to(DEVICE), b.to(DEVICE), (1, 1), (0, 0), (1, 1), (3, 3)


def not_under_estimated(found: torch.Tensor, arguments: Case) -> None:
    expected, largest = reference(*arguments), scale(*arguments)
    assert float((expected / largest).max()) < 1e-3  # they do cancel
    assert (found.double().cpu() >= expected).all()
    assert (found.double().cpu() <= expected + 2 * form.SLACK * largest).all()


@kernel_runs
@pytest.mark.parametrize("dtype", HALF)
def test_positions_that_cancel_are_not_under_estimated_by_any_tile(dtype: torch.dtype) -> None:
    arguments = cancelling(dtype)
    for tile in tiles_for(arguments):
        not_under_estimated(launched(arguments, tile), arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_positions_that_cancel_are_not_under_estimated_by_the_operator(dtype: torch.dtype) -> None:
    arguments = cancelling(dtype)
    not_under_estimated(convolution_gram_sq_norm(*arguments), arguments)


@kernel_runs
def test_one_sample_that_is_not_finite_spoils_no_other_and_is_seen() -> None:
    x, b, *geometry = case(5, 8, (6, 6), 8, (3, 3), padding=(1, 1), dtype=torch.float16)
    expected = promised(x, b, *geometry)
    x[1, 3, 2, 2], b[3, 2, 5, 5] = torch.nan, torch.inf
    for tile in tiles_for((x, b, *geometry)):
        found = launched((x, b, *geometry), tile)
        assert found.isfinite().tolist() == [True, False, True, False, True], tile
        torch.testing.assert_close(found[::2], expected[::2], rtol=CLOSE, atol=0)


@kernel_runs
def test_a_position_under_no_patch_does_not_matter_even_if_it_is_not_finite() -> None:
    x, b, *geometry = case(2, 8, (4, 7), 8, (2, 2), stride=(3, 3), dtype=torch.float16)
    expected = promised(x, b, *geometry)
    x[:, :, 2:], x[..., 2], x[..., 5:] = torch.nan, torch.inf, torch.nan
    for tile in tiles_for((x, b, *geometry)):
        torch.testing.assert_close(launched((x, b, *geometry), tile), expected, rtol=CLOSE, atol=0)
    torch.testing.assert_close(convolution_gram_sq_norm(x, b, *geometry).double().cpu(), expected, rtol=CLOSE, atol=0)


@kernel_runs
@pytest.mark.parametrize("samples", [1, 4, 9, 11])
def test_many_samples_are_taken_in_pieces(monkeypatch, samples: int) -> None:
    arguments = case(11, 8, (5, 6), 8, (3, 3), padding=(1, 1), dtype=torch.float16)
    monkeypatch.setattr(form, "SCRATCH_BYTES", samples * 4 * 30**2 + 5)
    for tile in tiles_for(arguments)[1:3]:
        torch.testing.assert_close(launched(arguments, tile), promised(*arguments), rtol=CLOSE, atol=0)


def test_the_twin_takes_many_samples_in_pieces(monkeypatch) -> None:
    arguments = case(7, 2, (5, 5), 3, (3, 3))
    monkeypatch.setattr(form.forms, "STREAM_FLOATS", 3 * 26**2)
    torch.testing.assert_close(convolution_gram_sq_norm(*arguments).cpu(), reference(*arguments), rtol=1e-10, atol=0)


def test_no_samples_give_no_norms() -> None:
    x, b, *geometry = case(1, 2, (5, 5), 3, (3, 3), dtype=torch.float16)
    found = convolution_gram_sq_norm(x[:0], b[:0], *geometry)
    assert found.shape == (0,) and found.dtype == torch.float32


def test_groups_several_images_of_a_unit_and_wrong_sizes_are_refused() -> None:
    x, b, *geometry = case(2, 4, (6, 6), 6, (3, 3))
    for more in ({"groups": 2}, {"probes": 2}):
        with pytest.raises(InputError, match="groups and probes must be 1"):
            convolution_gram_sq_norm(x, b, *geometry, **more)
    with pytest.raises(InputError, match="b must have"):
        convolution_gram_sq_norm(x, b[:, :, :3], *geometry)
    with pytest.raises(InputError, match="as many samples and one dtype"):
        convolution_gram_sq_norm(x, b.float(), *geometry)


def test_channels_last_of_a_multiple_of_eight_are_not_copied() -> None:
    t = torch.randn(2, 16, 3, 3).contiguous(memory_format=torch.channels_last)
    assert form.rows(t).data_ptr() == t.data_ptr() and form.rows(t).shape == (2, 3, 3, 16)
    assert torch.equal(form.rows(t.contiguous()), form.rows(t))
    padded = form.rows(t[:, :13])
    assert padded.shape == (2, 3, 3, 16) and not padded[..., 13:].any()
    assert torch.equal(padded[..., :13], t[:, :13].permute(0, 2, 3, 1))


def test_the_kernels_are_possible_only_on_cuda_for_few_positions() -> None:
    x, *_ = case(2, 8, (16, 16), 8, (3, 3), dtype=torch.bfloat16)
    able = DEVICE == "cuda" and form.triton is not None and torch.cuda.get_device_capability() >= (8, 0)
    assert form.possible(x, (3, 3)) == able
    wide = x.new_zeros(2, 8, 16, 17)
    assert not any(
        [
            form.possible(x.cpu(), (3, 3)),
            form.possible(wide, (3, 3)),
            form.possible(x[:0], (3, 3)),
            form.possible(x, (3, 3), groups=2),
            form.possible(x, (3, 3), probes=2),
            form.possible(x, (3, 31)),
        ]
    )


def test_the_cost_is_that_of_two_matrices_and_the_reads_between_them() -> None:
    assert form.gram_cost(64, 256, 64, 128, 9) == 64**2 * (256 + 128 + 9 * form.READ)
    assert form.gram_cost(256, 128, 49, 64, 1) == 10 * 64**2 * 128 + 64**2 * (64 + form.READ)  # ten tiles of sixteen
    assert form.gram_cost(64, 256, 64, 256, 9) < 64 * 9 * 256 * 256 / 8  # the product form
    assert form.gram_cost(256, 16, 256, 16, 9) > 256 * 9 * 16 * 16  # many positions of few channels: not worth it


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_there_are_few_tiles_to_try_and_each_is_legal(name: str) -> None:
    x, b, *geometry = case(*KERNEL_CASES[name])
    tiles = form.candidates(Shape.of(x, b, *geometry, 1))
    assert 1 <= len(tiles) <= 7 and len(set(tiles)) == len(tiles)
    for tile in tiles:
        largest = max(tile.block_x, tile.block)
        assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.block_x, tile.block, tile.deep))
        assert tile.stages * 2 * largest * tile.deep * 2 <= 220 * 1024  # bytes of shared memory
        assert largest**2 // (32 * tile.warps) <= 64  # accumulators in one thread's registers
        if tile.fused:
            assert tile.block_x >= x.shape[2] * x.shape[3] and tile.block >= b.shape[2] * b.shape[3]


def test_compilers_see_one_node() -> None:
    x, b, *geometry = case(2, 3, (6, 6), 4, (3, 3))
    norms = lambda x, b: convolution_gram_sq_norm(2 * x, b, *geometry) + 1
    graph = make_fx(norms, tracing_mode="fake")(x, b)
    nodes = [node for node in graph.graph.nodes if "convolution" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["clipwise.convolution_gram_sq_norm.default"]
    torch.testing.assert_close(graph(x, b), norms(x, b))
    compiled = torch.compile(norms, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    torch.testing.assert_close(compiled(x, b), norms(x, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_registered_as_torch_expects(dtype: torch.dtype) -> None:
    x, b, *geometry = case(2, 3, (6, 6), 4, (3, 3), dtype=dtype)
    lists = [list(pair) for pair in geometry]
    torch.library.opcheck(torch.ops.clipwise.convolution_gram_sq_norm.default, (x, b, *lists))


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_cuda_any_memory_format_gives_the_same_bits_every_time(dtype: torch.dtype) -> None:
    x, b, *geometry = case(512, 64, (8, 8), 64, (3, 3), padding=(1, 1), dtype=dtype)
    found = convolution_gram_sq_norm(x, b, *geometry)
    torch.testing.assert_close(found.double().cpu(), promised(x, b, *geometry), rtol=CLOSE, atol=0)
    last = (t.contiguous(memory_format=torch.channels_last) for t in (x, b))
    assert torch.equal(convolution_gram_sq_norm(*last, *geometry), found)
    for _ in range(20):  # a program that read what another thread has not written yet would show
        assert torch.equal(convolution_gram_sq_norm(x, b, *geometry), found)


@on_cuda
def test_the_kernels_can_be_recorded_in_a_cuda_graph() -> None:
    x, b, *geometry = case(4, 16, (8, 8), 16, (3, 3), padding=(1, 1), dtype=torch.bfloat16)
    expected = convolution_gram_sq_norm(x, b, *geometry)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = convolution_gram_sq_norm(x, b, *geometry)
    graph.replay()
    assert torch.equal(found, expected)


@kernel_runs
@pytest.mark.parametrize(("size", "place"), [((1, 2), (0, 1)), ((12, 12), (11, 11))])
def test_products_that_overflow_are_never_taken_for_small_ones(size: tuple[int, int], place: tuple[int, int]) -> None:
    # v₂ = −0.6 v₁ with ‖v₁‖² near float32's largest number: 2⟨v₁, v₂⟩ is −∞ there, and the norm far from 0
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x, b = torch.ones(1, 1, *size), torch.zeros(1, 1, *size)
    b[0, 0, 0, 0], b[0, 0, *place] = 3e38**0.5, -0.6 * 3e38**0.5
    x, b = (t.to(DEVICE, dtype) for t in (x, b))
    true = float((x.double() * b.double()).sum().abs())
    rows = form.rows(x), form.rows(b)
    shape = form.Shape.of(form._images(rows[0]), form._images(rows[1]), (1, 1), (0, 0), (1, 1), (1, 1), 1)
    for tile in form.candidates(shape):
        found = float(form.launch(*rows, shape, tile).double().sqrt())
        assert not found < true * (1 - 1e-5)  # larger, infinite or not a number
