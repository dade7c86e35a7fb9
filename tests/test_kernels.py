"""Every kernel against its plain twin, and the twin against the written-out gradient in float64.

Receives: random convolutions of every geometry. On CUDA the kernel itself runs; so it does, slowly, on any machine that
has Triton when TRITON_INTERPRET=1 is set.
Gives: agreement to the format's rounding, and never a norm that is too small by more.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from clipwise.records.kernels import convolution, convolution_sq_norm
from clipwise.records.kinds import Convolution, Geometry
from clipwise.types import InputError

CUDA = torch.cuda.is_available()
INTERPRETED = convolution.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA and not INTERPRETED else "cpu"
kernel_runs = pytest.mark.skipif(
    not (INTERPRETED or (CUDA and convolution.triton is not None)), reason="needs CUDA, or Triton's interpreter"
)

Case = tuple[torch.Tensor, torch.Tensor, tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], int]


def case(
    n: int,
    channels: int,
    size: tuple[int, int],
    outputs: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """x and b with large and small samples, and the geometry in the operator's order."""
    random = torch.Generator().manual_seed(7 * n + channels + outputs)
    out = [(size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    scales = torch.logspace(-2, 2, n, dtype=torch.float64).reshape(-1, 1, 1, 1)
    x = scales * torch.randn(n, channels, *size, generator=random, dtype=torch.float64)
    b = 0.3 + torch.randn(n, outputs, *out, generator=random, dtype=torch.float64)
    return x.to(dtype), b.to(dtype), stride, padding, dilation, kernel, groups


def reference(x, b, stride, padding, dilation, kernel, groups) -> torch.Tensor:
    """Written out in float64, from the values as they were rounded."""
    shape = torch.Size([b.shape[1], x.shape[1] // groups, *kernel])
    record = Convolution(x.double().cpu(), b.double().cpu(), Geometry(shape, stride, padding, dilation, groups))
    return record.dense().square().flatten(1).sum(1)


@st.composite
def cases(draw) -> Case:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    pair = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))
    kernel, dilation = pair(1, 4), pair(1, 3)
    padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
    least = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) for i in (0, 1)]
    size = (least[0] + draw(st.integers(0, 7)), least[1] + draw(st.integers(0, 7)))
    channels, outputs = groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 5))
    return case(draw(st.integers(1, 4)), channels, size, outputs, kernel, pair(1, 3), padding, dilation, groups)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_twin_gives_the_norm_of_the_written_gradient(arguments: Case) -> None:
    torch.testing.assert_close(convolution_sq_norm(*arguments), reference(*arguments), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_accumulates_half_precision_in_float32(dtype: torch.dtype) -> None:
    arguments = case(3, 5, (9, 7), 4, (3, 3), padding=(1, 1), dtype=dtype)
    found = convolution_sq_norm(*arguments)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference(*arguments), rtol=1e-5, atol=0)


def test_no_samples_give_no_norms() -> None:
    x, b, *geometry = case(1, 2, (5, 5), 3, (3, 3), dtype=torch.float32)
    assert convolution_sq_norm(x[:0].to(DEVICE), b[:0].to(DEVICE), *geometry).shape == (0,)


def test_many_samples_are_taken_a_few_at_a_time(monkeypatch) -> None:
    arguments = case(7, 2, (5, 5), 3, (3, 3))
    monkeypatch.setattr(convolution.planner, "STREAM_FLOATS", 3 * 2 * 9 * 3)  # three samples' gradients
    torch.testing.assert_close(convolution_sq_norm(*arguments), reference(*arguments), rtol=1e-10, atol=0)


def test_sizes_that_do_not_belong_together_are_refused() -> None:
    x, b, stride, padding, dilation, kernel, groups = case(2, 4, (6, 6), 6, (3, 3))
    for wrong in (
        (x, b[:1], stride, padding, dilation, kernel, groups),
        (x, b.float(), stride, padding, dilation, kernel, groups),
        (x, b, stride, (1, 1), dilation, kernel, groups),
        (x, b, stride, padding, dilation, (3, 2), groups),
        (x, b, stride, padding, dilation, kernel, 3),
    ):
        with pytest.raises(InputError, match="must"):
            convolution_sq_norm(*wrong)


def test_compilers_see_one_node() -> None:
    x, b, *geometry = (t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in case(2, 3, (6, 6), 4, (3, 3)))
    norms = lambda x, b: convolution_sq_norm(2 * x, b, *geometry) + 1
    graph = make_fx(norms, tracing_mode="fake")(x, b)
    nodes = [node for node in graph.graph.nodes if "convolution" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["clipwise.convolution_sq_norm.default"]
    torch.testing.assert_close(graph(x, b), norms(x, b))
    compiled = torch.compile(norms, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    torch.testing.assert_close(compiled(x, b), norms(x, b))


def test_the_operator_is_registered_as_torch_expects() -> None:
    x, b, *geometry = case(2, 3, (6, 6), 4, (3, 3), dtype=torch.float32)
    arguments = (x.to(DEVICE), b.to(DEVICE), *(list(g) if isinstance(g, tuple) else g for g in geometry))
    torch.library.opcheck(torch.ops.clipwise.convolution_sq_norm.default, arguments)


def test_there_are_few_tiles_to_try_and_each_is_legal() -> None:
    for channels, outputs, side, kernel in [
        (1, 1, 1, 1),
        (3, 16, 32, 3),
        (16, 16, 32, 3),
        (256, 256, 8, 3),
        (64, 10, 7, 1),
    ]:
        shape = convolution.Shape.of(
            *case(1, channels, (side, side), outputs, (kernel,) * 2, padding=(kernel // 2,) * 2)
        )
        for size in (2, 4):
            tiles = convolution.candidates(shape, size)
            assert 1 <= len(tiles) <= 6
            for tile in tiles:
                blocks = (tile.block_o, tile.block_c, tile.block_p)
                assert all(block >= 16 and block & (block - 1) == 0 for block in blocks)
                assert tile.block_o * tile.block_c // (32 * tile.warps) <= 128  # accumulators in one thread's registers
                assert max(1, tile.stages) * (tile.block_o + tile.block_c) * tile.block_p * size <= 220 * 1024


# Channels and columns that fill tiles and that do not, one tap per tile and several, all positions at once or not.
KERNEL_CASES = {  # sample, channel, size, output; kernel, stride, padding, dilation, groups
    "several taps in a tile": (3, 16, (7, 9), 16, (3, 3), (1, 1), (1, 1)),
    "one tap in a tile": (2, 32, (6, 6), 20, (3, 3), (1, 1), (1, 1)),
    "first layer": (2, 3, (10, 10), 16, (3, 3), (1, 1), (1, 1)),
    "one channel, stride 2": (2, 1, (28, 28), 16, (8, 8), (2, 2), (3, 3)),
    "no padding, stride 2": (2, 16, (13, 13), 32, (4, 4), (2, 2)),
    "one by one": (2, 40, (5, 5), 70, (1, 1)),
    "dilated, oblong": (2, 5, (12, 9), 7, (3, 2), (1, 2), (2, 1), (2, 3)),
    "groups": (2, 12, (6, 6), 9, (3, 3), (1, 1), (1, 1), (1, 1), 3),
    "depthwise": (1, 6, (5, 5), 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "one position": (2, 8, (3, 3), 33, (3, 3)),
}
FORMATS = {  # the interpreter knows no bfloat16
    "bfloat16": (torch.bfloat16, 1e-4),
    "float16": (torch.float16, 1e-4),
    "float32": (torch.float32, 1e-5),
}


def on_device(arguments: Case) -> Case:
    x, b, *geometry = arguments
    x, b = (t.to(DEVICE).contiguous(memory_format=torch.channels_last) for t in (x, b))
    return (x, b, *geometry)


@kernel_runs
@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "bfloat16" or not INTERPRETED])
def test_the_kernel_agrees_with_float64_for_every_tile(name: str, form: str) -> None:
    dtype, tolerance = FORMATS[form]
    arguments = on_device(case(*KERNEL_CASES[name], dtype=dtype))
    shape, expected = convolution.Shape.of(*arguments), reference(*arguments)
    tiles = [convolution.Tile(16, 16, 16, 4, 2, swapped=False), convolution.Tile(16, 32, 256, 4, 2, swapped=True)]
    for tile in tiles if INTERPRETED else tiles + convolution.candidates(shape, dtype.itemsize):
        found = convolution.launch(*arguments[:2], shape, tile).double().cpu()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=lambda text, t=tile: f"{t}: {text}")


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_cuda_any_memory_format_gives_the_same_bits_every_time(dtype: torch.dtype) -> None:
    x, b, *geometry = on_device(case(8, 16, (12, 12), 32, (3, 3), padding=(1, 1), dtype=dtype))
    found = convolution_sq_norm(x, b, *geometry)
    torch.testing.assert_close(found.double().cpu(), reference(x, b, *geometry), rtol=1e-4, atol=0)
    assert torch.equal(convolution_sq_norm(x.contiguous(), b.contiguous(), *geometry), found)


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("form", FORMATS)
def test_on_cuda_no_norm_is_under_estimated_even_where_every_product_has_one_sign(form: str) -> None:
    dtype, tolerance = FORMATS[form]
    # Truncation, as in TF32, would make all of these too small: nothing cancels.
    x, b, *geometry = case(16, 32, (32, 32), 32, (3, 3), padding=(1, 1), dtype=dtype)
    arguments = on_device((x.abs(), b.abs(), *geometry))
    expected = reference(*arguments)
    assert (convolution_sq_norm(*arguments).double().cpu() >= expected * (1 - tolerance)).all()


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_the_kernel_can_be_recorded_in_a_cuda_graph() -> None:
    x, b, *geometry = on_device(case(4, 16, (8, 8), 16, (3, 3), padding=(1, 1), dtype=torch.bfloat16))
    expected = convolution_sq_norm(x, b, *geometry)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = convolution_sq_norm(x, b, *geometry)
    graph.replay()
    assert torch.equal(found, expected)
