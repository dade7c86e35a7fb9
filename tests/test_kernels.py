"""Every kernel against its plain twin, and the twin against the written-out gradient in float64.

Receives: random convolutions of every geometry. On CUDA the kernel itself runs; so it does, slowly, on any machine that
has Triton when TRITON_INTERPRET=1 is set.
Gives: agreement to the format's rounding, and never a norm that is too small by more.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from clipwise.records import kinds
from clipwise.records.kernels import (
    convolution,
    convolution_dense,
    convolution_sq_norm,
    convolution_tiles,
    convolution_total,
    gram,
    gram_sq_norm,
    outer_dense,
    outer_gram_sq_norms,
    outer_totals,
    positions_total,
    rows_total,
)
from clipwise.records.kernels import norms as norms_kernel
from clipwise.records.kernels import totals as totals_kernel
from clipwise.records.kernels import written as written_kernel
from clipwise.records.kernels.rows import ZeroRows, _apart, zero_rows
from clipwise.records.kinds import Convolution, Dense, Geometry, Indexed, Outer, cross, sq_norms
from clipwise.types import InputError
from images import CUDA, DEVICE, INTERPRETED, images, kernel_runs

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
    x, b = images(n, channels, size, outputs, kernel, stride, padding, dilation, decades=2)
    return x.to(dtype), b.to(dtype), stride, padding, dilation, kernel, groups


def written(x, b, stride, padding, dilation, kernel, groups, probes: int = 1) -> torch.Tensor:
    """Every unit's gradient in float64, from the values as they were rounded, one output position at a time."""
    x, b = x.double().cpu(), b.double().cpu()
    n, outputs, channels = x.shape[0], b.shape[1], x.shape[1] // groups
    x = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    v = torch.zeros(n, outputs, channels, *kernel, dtype=torch.float64)
    for y in range(b.shape[2]):
        for z in range(b.shape[3]):
            rows = [y * stride[0] + k * dilation[0] for k in range(kernel[0])]
            patch = x[:, :, rows][..., [z * stride[1] + k * dilation[1] for k in range(kernel[1])]]
            patch = patch.reshape(n, groups, 1, channels, *kernel)
            v += (b[:, :, y, z].reshape(n, groups, -1, 1, 1, 1) * patch).reshape(n, outputs, channels, *kernel)
    return v.reshape(n // probes, probes, *v.shape[1:]).sum(1)


def reference(*arguments) -> torch.Tensor:
    return written(*arguments).square().flatten(1).sum(1)


def test_the_reference_is_autograd_s_weight_gradient() -> None:
    x, b, stride, padding, dilation, kernel, groups = arguments = case(
        3, 4, (7, 6), 6, (3, 2), (2, 1), (1, 1), (1, 2), 2
    )
    weight = torch.randn(6, 2, *kernel, dtype=torch.float64, requires_grad=True)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, groups)
    torch.testing.assert_close(torch.autograd.grad((out * b).sum(), weight)[0], written(*arguments).sum(0))


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


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_the_twins_give_the_written_gradient_its_norm_and_the_weighted_sum(arguments: Case, units: bool) -> None:
    probes = arguments[0].shape[0] if units else 1
    v = written(*arguments, probes)
    weights = torch.linspace(-1, 2, len(v), dtype=torch.float64)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-9)
    close(convolution_sq_norm(*arguments, probes), v.square().flatten(1).sum(1))
    close(convolution_dense(*arguments, probes), v)
    close(convolution_total(*arguments[:2], weights, *arguments[2:], probes), torch.tensordot(weights, v, 1))


def test_a_record_of_several_images_is_their_sum_also_where_they_are_added_one_by_one() -> None:
    x, b, stride, padding, dilation, kernel, groups = arguments = case(6, 4, (7, 6), 6, (3, 2), groups=2)
    geometry = Geometry(torch.Size([6, 2, *kernel]), stride, padding, dilation, groups)
    record = Convolution(x, b, geometry)
    expected = written(*arguments, 2)
    ones = [Convolution(x[i::2], b[i::2], geometry) for i in (0, 1)]
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for units in (record.merged(2), ones[0].plus(ones[1])):
        assert units.samples == 3 and units.probes == 2
        torch.testing.assert_close(units.dense(), expected)
        torch.testing.assert_close(units.sq_norm(), expected.square().flatten(1).sum(1))
        torch.testing.assert_close(units.total(weights), torch.tensordot(weights, expected, 1))
        torch.testing.assert_close(units.unfolded().dense(), expected)
        torch.testing.assert_close(units.inner(expected[0]), (expected * expected[0]).flatten(1).sum(1))
        torch.testing.assert_close(units.rows(1, 3).dense(), expected[1:])
    assert record.merged(2).merged(3).probes == 6
    torch.testing.assert_close(record.merged(2).merged(3).dense(), expected.sum(0, keepdim=True))


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
    monkeypatch.setattr(convolution.forms, "STREAM_FLOATS", 3 * 2 * 9 * 3)  # three samples' gradients
    torch.testing.assert_close(convolution_sq_norm(*arguments), reference(*arguments), rtol=1e-10, atol=0)


def test_sizes_that_do_not_belong_together_are_refused() -> None:
    x, b, stride, padding, dilation, kernel, groups = case(2, 4, (6, 6), 6, (3, 3))
    for wrong in (
        (x, b[:1], stride, padding, dilation, kernel, groups),
        (x, b.float(), stride, padding, dilation, kernel, groups),
        (x, b, stride, (1, 1), dilation, kernel, groups),
        (x, b, stride, padding, dilation, (3, 2), groups),
        (x, b, stride, padding, dilation, kernel, 3),
        (x, b, stride, padding, dilation, kernel, groups, 4),
    ):
        with pytest.raises(InputError, match="must"):
            convolution_sq_norm(*wrong)
    with pytest.raises(InputError, match="one for each of 2 units, got"):
        convolution_total(x, b, torch.ones(3), stride, padding, dilation, kernel, groups)


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
    x, b, geometry = x.to(DEVICE), b.to(DEVICE), [list(g) if isinstance(g, tuple) else g for g in geometry] + [2]
    torch.library.opcheck(torch.ops.clipwise.convolution_sq_norm.default, (x, b, *geometry))
    torch.library.opcheck(torch.ops.clipwise.convolution_dense.default, (x, b, *geometry, torch.bfloat16))
    torch.library.opcheck(torch.ops.clipwise.convolution_total.default, (x, b, torch.ones(1).to(DEVICE), *geometry))
    rows = torch.randn(2, 5, 8).to(DEVICE)
    torch.library.opcheck(torch.ops.clipwise.gram_sq_norm.default, (rows, rows))
    torch.library.opcheck(torch.ops.clipwise.outer_dense.default, (rows, rows))
    torch.library.opcheck(torch.ops.clipwise.rows_total.default, (rows.bfloat16(), torch.ones(2, 5, device=DEVICE)))
    torch.library.opcheck(torch.ops.clipwise.rows_total.default, (rows.bfloat16(), None))


def test_there_are_few_tiles_to_try_and_each_is_legal() -> None:
    for channels, outputs, side, kernel in [
        (1, 1, 1, 1),
        (3, 16, 32, 3),
        (16, 16, 32, 3),
        (256, 256, 8, 3),
        (64, 10, 7, 1),
    ]:
        shape = convolution_tiles.Shape.of(
            *case(1, channels, (side, side), outputs, (kernel,) * 2, padding=(kernel // 2,) * 2)
        )
        for size in (2, 4):
            tiles = convolution_tiles.candidates(shape, size)
            assert 1 <= len(tiles) <= 6
            for tile in tiles:
                blocks = (tile.block_o, tile.block_c, tile.block_p)
                assert all(block >= 16 and block & (block - 1) == 0 for block in blocks)
                assert tile.block_o * tile.block_c // (32 * tile.warps) <= 128  # accumulators in one thread's registers
                assert max(1, tile.stages) * (tile.block_o + tile.block_c) * tile.block_p * size <= 220 * 1024
            for tile in convolution_tiles.total_candidates(shape, size):
                assert 2 * tile.block_o * tile.block_c // (32 * tile.warps) <= 128  # two accumulators
                assert tile.stages * (tile.block_o + tile.block_c) * tile.block_p * size <= 220 * 1024


@given(st.integers(1, 5000), st.integers(1, 300))
def test_a_sum_is_split_into_no_more_parts_than_it_has_units(programs: int, units: int) -> None:
    parts = convolution_tiles._parts(programs, units, 132)
    assert 1 <= parts <= units
    assert parts == 1 or (parts - 1) * programs < 5 * 132  # more would only be more to write


SMALL = [
    convolution_tiles.Tile(16, 16, 16, 4, 2, swapped=False),
    convolution_tiles.Tile(16, 32, 256, 4, 2, swapped=True),
]
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
    shape, expected = convolution_tiles.Shape.of(*arguments), reference(*arguments)
    for tile in SMALL if INTERPRETED else SMALL + convolution_tiles.candidates(shape, dtype.itemsize):
        found = convolution_tiles.launch(*arguments[:2], shape, tile).double().cpu()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=lambda text, t=tile: f"{t}: {text}")


@kernel_runs
@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "bfloat16" or not INTERPRETED])
@pytest.mark.parametrize("probes", [1, 2])
def test_the_kernels_that_write_and_sum_agree_with_float64_for_every_tile(name: str, form: str, probes: int) -> None:
    dtype, tolerance = FORMATS[form]
    n, *rest = KERNEL_CASES[name]
    arguments = on_device(case(n * probes, *rest, dtype=dtype))
    shape, v = convolution_tiles.Shape.of(*arguments, probes), written(*arguments, probes)
    weights = torch.linspace(-1, 2, len(v), dtype=torch.float64)
    norms = v.square().flatten(1).sum(1)
    sizes = v.flatten(1).norm(dim=1)
    total = torch.tensordot(weights, v, 1)
    close = tolerance * float((weights.abs() * sizes).max())
    wide = convolution_tiles.candidates(shape, dtype.itemsize)[-1:]
    for tile in SMALL if INTERPRETED else SMALL + wide + convolution_tiles.total_candidates(shape, dtype.itemsize):
        told = lambda text, t=tile: f"{t}: {text}"
        found = convolution_tiles.launch_dense(*arguments[:2], shape, tile).double().cpu()
        found = found.reshape(len(v), v.shape[1], *v.shape[3:], v.shape[2]).permute(0, 1, 4, 2, 3)
        assert ((found - v).flatten(1).norm(dim=1) <= tolerance * sizes).all(), told("dense")
        if not INTERPRETED:  # rounded once: as the wide one would be, but where that lies between two numbers
            narrow = convolution_tiles.launch_dense(*arguments[:2], shape, tile, dtype=torch.bfloat16)
            wide_ = convolution_tiles.launch_dense(*arguments[:2], shape, tile)
            assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide_.bfloat16()), told("narrow")
        found = convolution_tiles.launch(*arguments[:2], shape, tile).double().cpu()
        torch.testing.assert_close(found, norms, rtol=tolerance, atol=0, msg=told)
        found = convolution_tiles.launch_total(*arguments[:2], weights.float().to(DEVICE), shape, tile).double().cpu()
        found = found.reshape(v.shape[1], *v.shape[3:], v.shape[2]).permute(0, 3, 1, 2)
        torch.testing.assert_close(found, total, rtol=0, atol=close, msg=told)


ROWS = {  # samples, positions, p, q
    "one tile": (3, 16, 16, 24),
    "a part of a tile": (2, 21, 40, 8),
    "several tiles": (2, 70, 24, 136),
    "features that are no multiple of eight": (2, 33, 19, 50),
}


def rows(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    samples, positions, p, q = ROWS[name]
    random = torch.Generator().manual_seed(samples * positions + q)
    scales = torch.logspace(-1, 1, samples, dtype=torch.float64)[:, None, None, None]
    a = scales * torch.randn(samples, 1, positions, p, generator=random, dtype=torch.float64)
    b = 0.3 + torch.randn(samples, 1, positions, q, generator=random, dtype=torch.float64)
    return a.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE)


@kernel_runs
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("form", ["float16"] if INTERPRETED else ["float16", "bfloat16"])
def test_the_gram_kernel_agrees_with_float64_for_every_tile(name: str, form: str) -> None:
    a, b = rows(name, FORMATS[form][0])
    expected = (b.double().transpose(2, 3) @ a.double()).square().flatten(1).sum(1).cpu()
    small = [gram.Tile(16, 16, 4, 2), gram.Tile(32, 32, 4, 2)]
    for tile in small if INTERPRETED else small + gram.candidates(a.shape[2]):
        found = gram.launch(*(gram.aligned(t[:, 0]) for t in (a, b)), tile).double().cpu()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0, msg=lambda text, t=tile: f"{t}: {text}")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_have_the_norm_sum_and_gradient_of_the_written_product_on_any_device(name: str, dtype) -> None:
    a, b = rows(name, dtype)
    record = Outer(a, b, torch.Size([b.shape[3], a.shape[3]]))
    v = (b.double().transpose(2, 3) @ a.double())[:, 0].cpu()
    weights = torch.linspace(-1, 2, len(v), dtype=torch.float64)
    tolerance = 2e-3 if dtype == torch.float32 and DEVICE == "cuda" else 1e-4  # TF32 may be on
    norms = v.square().flatten(1).sum(1)
    for found in (record.sq_norm(), gram_sq_norm(a, b), record.dense().square().flatten(1).sum(1)):
        torch.testing.assert_close(found.double().cpu(), norms, rtol=tolerance, atol=0)
    total = record.total(weights.to(DEVICE, torch.float32 if dtype == torch.bfloat16 else dtype)).double().cpu()
    torch.testing.assert_close(
        total, torch.tensordot(weights, v, 1), rtol=0, atol=tolerance * float(norms.max().sqrt())
    )


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_a_weighted_term_is_the_weight_times_the_gradient_whose_norm_was_taken(dtype: torch.dtype) -> None:
    # positions that cancel almost completely: a product with b rounded to its format would be far longer than the bound
    torch.manual_seed(0)
    a = torch.randn(4, 1, 32, 64, device=DEVICE).to(dtype).repeat(1, 1, 2, 1)
    b = torch.randn(4, 1, 32, 48, device=DEVICE).to(dtype)
    b = torch.cat([b, -b * (1 + 2.0**-6)], 2)  # the second half is rounded to the format too
    record = Outer(a, b, torch.Size([48, 64]))
    norms = record.sq_norm().double().sqrt()
    weights = (1 / norms).float()
    for i in range(4):
        alone = torch.where(torch.arange(4, device=DEVICE) == i, weights, 0.0)
        length = float(record.total(alone).double().norm())
        assert abs(length - 1) < 1e-3
    rounded = (
        ((b * weights[:, None, None, None]).to(dtype).double().transpose(2, 3) @ a.double()).flatten(1).norm(dim=1)
    )
    if dtype == torch.bfloat16:
        assert float(rounded.max()) > 1.003  # what scaling b itself would have summed


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


def strided() -> list[torch.Tensor]:
    """Five rows each, in every order that memory may have, with gaps and in several formats."""
    return [
        torch.randn(5, 3, 4),
        torch.randn(3, 5, 7).transpose(0, 1),
        torch.randn(5, 2, 3, 4, 5)[:, :, 1:],
        torch.randn(5, 6).half(),
        torch.randn(5, 8).double()[:, ::2],
        torch.randn(5),
    ]


@kernel_runs
@pytest.mark.parametrize("kept", [(True,) * 5, (True, False, True, True, False), (False,) * 5])
def test_rows_are_set_to_zero_where_they_lie_and_nothing_else_is(kept: tuple[bool, ...]) -> None:
    owners = [t if t._base is None else t._base for t in strided()]
    values = [t.to(DEVICE) for t in owners]
    views = [v.as_strided(t.shape, t.stride(), t.storage_offset()) for v, t in zip(values, strided(), strict=True)]
    keep = torch.tensor(kept, device=DEVICE)
    expected = [v.clone() for v in values]
    for owner, view in zip(expected, views, strict=True):
        own = owner.as_strided(view.shape, view.stride(), view.storage_offset())
        own[~keep] = 0
    ZeroRows(views)(keep)
    assert all(map(torch.equal, values, expected))


def test_rows_that_cannot_be_set_alone_are_not_taken() -> None:
    assert all(map(_apart, strided()))
    repeated, windows = torch.randn(1, 4).expand(5, 4), torch.randn(20).as_strided((5, 4), (2, 1))
    assert not _apart(repeated) and not _apart(windows) and not _apart(torch.randn(()))
    assert zero_rows(strided(), 5, ()) is None  # not on CUDA: there the host knows at once


@pytest.mark.skipif(not CUDA or convolution.triton is None, reason="needs CUDA")
def test_rows_of_a_parameter_are_never_set() -> None:
    own, other = torch.randn(5, 3, device="cuda"), torch.randn(5, 3, device="cuda")
    assert isinstance(zero_rows([own], 5, [other]), ZeroRows)
    assert zero_rows([own[:, 1:]], 5, [own]) is None and zero_rows([own], 4, []) is None


def linear_layers(units: int, positions: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Factors of layers of odd and even sizes, some of them in rows with room to spare."""
    torch.manual_seed(units + positions)
    sizes = [(136, 72), (40, 264), (8, 16), (24, 77)]
    a = [torch.randn(units, positions, p).to(dtype) for p, _ in sizes]
    b = [torch.randn(units, positions, -(-q // 8) * 8).to(dtype)[:, :, :q] for _, q in sizes]
    return [t.to(DEVICE) for t in a], [_moved(t) for t in b]


def _moved(t: torch.Tensor) -> torch.Tensor:
    owner = t if t._base is None else t._base
    return owner.to(DEVICE)[:, :, : t.shape[2]]


@kernel_runs
@pytest.mark.parametrize("positions", [2, 16, 40, 128, 197])
def test_sums_of_many_linear_layers_are_those_of_each(positions: int) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU that fetches tiles by itself")
    a, b = linear_layers(3, positions, torch.float16)
    weights = torch.tensor([[0.5, -2.0, 0.0]]).repeat(4, 1).to(DEVICE) * torch.arange(1, 5, device=DEVICE)[:, None]
    expected = [
        torch.einsum("n,nsq,nsp->qp", w.double(), y.double(), x.double()) for x, y, w in zip(a, b, weights, strict=True)
    ]
    for tile in totals_kernel.candidates(positions):
        small = replace(tile, block_q=64, block_p=32) if INTERPRETED else tile
        pieces = totals_kernel.launch(a, b, weights, small).split([exact.numel() for exact in expected])
        for found, exact in zip(pieces, expected, strict=True):
            assert (found.view(exact.shape) - exact).norm() <= 1e-5 * exact.norm()


@kernel_runs
@pytest.mark.parametrize("positions", [2, 16, 40, 128, 197])
def test_gram_norms_of_many_linear_layers_are_those_of_each(positions: int) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU that fetches tiles by itself")
    a, b = linear_layers(3, positions, torch.float16)
    b[0][1] = 0
    b[1] = b[1] * 2.0**-14  # near the smallest numbers of its format
    b[3][2, :, 0] = torch.nan
    products = [torch.einsum("nsq,nsp->nqp", y.double(), x.double()) for x, y in zip(a, b, strict=True)]
    expected = torch.stack([v.square().sum((1, 2)) for v in products])
    lengths = torch.stack([(x.double().norm(dim=2) * y.double().norm(dim=2)).sum(1) for x, y in zip(a, b, strict=True)])
    for tile in norms_kernel.candidates(positions):
        found = norms_kernel.launch(a, b, tile)
        assert found[3, 2].isnan() and expected[3, 2].isnan()
        real = expected.isfinite()
        assert (found[real] >= (1 - 1e-6) * expected[real]).all()  # a norm is never under-estimated
        most = (1 + 1e-5) * expected + 2 * gram.SLACK * lengths.square() + 1e-20
        assert (found[real] <= most[real]).all()
        assert found[0, 1] < 1e-20 and torch.equal(found[real], norms_kernel.launch(a, b, tile)[real])


def test_gram_norms_of_linear_layers_elsewhere_are_the_twin_s_and_what_does_not_fit_is_refused() -> None:
    a, b = linear_layers(3, 5, torch.float32)
    expected = torch.stack([torch.einsum("nsq,nsp->nqp", y, x).square().sum((1, 2)) for x, y in zip(a, b, strict=True)])
    assert torch.allclose(outer_gram_sq_norms(a, b), expected, rtol=1e-4)
    torch.library.opcheck(torch.ops.clipwise.outer_gram_sq_norms.default, (a, b))
    for wrong in [(a, b[:3]), ([t[:2] for t in a], b), ([], [])]:
        with pytest.raises(InputError, match="expected"):
            outer_gram_sq_norms(*wrong)


@pytest.mark.parametrize("halved", [False, True])
def test_norms_of_layers_taken_together_are_those_of_each(halved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kinds.outer, kinds.sums):
        monkeypatch.setattr(module, "by_kernel", lambda a, other: a.shape[2] > 1)
    monkeypatch.setattr(kinds.sums, "takes", lambda a, b: True)
    torch.manual_seed(0)
    sizes = [(3, 6, 5), (3, 4, 7), (1, 6, 4), (5, 3, 2)]  # positions, p, q
    records = [Outer(torch.randn(4, 1, t, p), torch.randn(4, 1, t, q), torch.Size([q, p])) for t, p, q in sizes]
    expected = sum(record.sq_norm() for record in records)
    together = [record.halved() if halved and i < 2 else record for i, record in enumerate(records)]
    parts = sq_norms([*together, Dense(torch.ones(4, 2))])
    assert len(parts) == 4  # three positions each, five, one, and what is no linear layer's
    assert torch.allclose(sum(parts), expected + 2, rtol=1e-2 if halved else 1e-5)


def test_sums_of_linear_layers_elsewhere_are_the_twin_s_and_what_does_not_fit_is_refused() -> None:
    a, b = linear_layers(3, 5, torch.float32)
    weights = torch.rand(4, 3).to(DEVICE)
    for x, y, w, found in zip(a, b, weights, outer_totals(a, b, weights), strict=True):
        assert torch.allclose(found, torch.einsum("n,nsq,nsp->qp", w, y, x), rtol=1e-4, atol=1e-4)
    torch.library.opcheck(torch.ops.clipwise.outer_totals.default, (a, b, weights))
    for wrong in [(a, b[:3], weights), (a, b, weights[:3]), ([t[:2] for t in a], b, weights), ([], [], weights[:0])]:
        with pytest.raises(InputError, match="expected"):
            outer_totals(*wrong)


@pytest.mark.parametrize("q", [16, 13])
def test_spare_features_change_nothing(q: int) -> None:
    torch.manual_seed(q)
    plain = Outer(torch.randn(3, 1, 4, 6), torch.randn(3, 1, 4, q), torch.Size([q, 6]))
    wide = Outer(
        torch.nn.functional.pad(plain.a, (0, 2)), torch.nn.functional.pad(plain.b, (0, 3)), plain.shape, (2, 3)
    )
    weights, direction = torch.rand(3), torch.randn(q, 6)
    assert torch.allclose(wide.sq_norm(), plain.sq_norm())
    assert torch.allclose(wide.total(weights), plain.total(weights), atol=1e-6)
    assert torch.allclose(wide.dense(), plain.dense()) and torch.allclose(wide.inner(direction), plain.inner(direction))
    assert torch.equal(wide.plus(plain).a, plain.plus(plain).a) and wide.unpadded().b.shape == plain.b.shape
    for changed in (wide.masked(torch.tensor([True, False, True])), wide.rows(1, 3), wide.scaled(weights)):
        assert changed.spare == (2, 3)
    assert torch.allclose(wide.merged(3).dense()[0], plain.dense().sum(0), atol=1e-5)
    table = Indexed(torch.randint(q, (3, 4)), torch.randn(3, 4, 6), plain.shape)
    assert torch.allclose(cross(table, wide), cross(table, plain), atol=1e-5)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_a_factor_whose_square_underflows_beside_a_huge_one_is_not_lost(positions: int, turned: bool) -> None:
    # ‖v‖ is about 100, but b Bᵀ is below the smallest normal number, which a GPU may take for zero
    a, b = torch.full((2, 1, positions, 4), 5e18), torch.full((2, 1, positions, 64), 2e-20 / positions)
    a, b = (b, a) if turned else (a, b)
    b = b.to(DEVICE)
    a = a.to(DEVICE)
    exact = (b.double().mT @ a.double()).flatten(1).norm(dim=1)
    before = torch.set_flush_denormal(True)
    try:
        assert bool((gram_sq_norm(a, b).sqrt() >= exact * (1 - 1e-5)).all())
        if positions > 1 and DEVICE == "cuda":
            half = a.bfloat16(), b.bfloat16()
            exact = (half[1].double().mT @ half[0].double()).flatten(1).norm(dim=1)
            assert bool((gram_sq_norm(*half).sqrt() >= exact * (1 - 1e-5)).all())
    finally:
        torch.set_flush_denormal(False)
    assert before or DEVICE == "cuda"  # else this processor cannot flush, and nothing was tested


@kernel_runs
@pytest.mark.parametrize(("samples", "size"), [(1, 1), (3, 512), (8, 5000), (40, 2000), (300, 70)])
def test_the_weighted_sum_of_narrow_rows_is_that_of_their_numbers(samples: int, size: int) -> None:
    random = torch.Generator().manual_seed(samples + size)
    scales = torch.logspace(-2, 2, samples, dtype=torch.float64)
    rows = (scales[:, None] * torch.randn(samples, size, generator=random, dtype=torch.float64)).half()
    weights = 1 / scales.float()  # no number of half precision
    expected = weights.double() @ rows.double()
    found = _totals(rows[None].to(DEVICE), weights[None].to(DEVICE))[0]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=1e-6 * samples)
    if not INTERPRETED:
        assert torch.equal(rows_total(rows.to(DEVICE), weights.to(DEVICE)), found)


@kernel_runs
@pytest.mark.parametrize("gap", [0, 3])
def test_positions_are_added_up_for_each_sample_also_where_rows_have_gaps(gap: int) -> None:
    rows = torch.randn(5, 37, 40 + gap, generator=torch.Generator().manual_seed(0)).half()[..., :40]
    expected = rows.double().sum(1)
    rows = torch.nn.functional.pad(rows, (0, gap)).to(DEVICE)[..., :40]
    torch.testing.assert_close(_totals(rows, None).double().cpu(), expected, rtol=0, atol=1e-5)
    if not INTERPRETED:
        assert torch.equal(positions_total(rows), _totals(rows, None))


@pytest.mark.parametrize("shape", [(70_000, 2, 3), (1, 4, 40_000_000)])
def test_as_many_programs_are_started_as_a_gpu_takes(shape: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: grids.append(grid)

    monkeypatch.setattr(written_kernel, "_total_kernel", Kernel())
    written_kernel.launch_total(torch.empty(shape, dtype=torch.half, device="meta"), None)
    ((first, *others),) = grids
    assert first >= shape[0] and first < 2**31 and all(size <= 65_535 for size in others)


def _totals(rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return written_kernel.launch_total(rows, weights)


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_the_twins_sum_a_few_numbers_of_all_rows_at_a_time(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_kernel.forms, "CUDA_STREAM_FLOATS", 20)
    rows, weights = torch.randn(samples, 11).bfloat16(), torch.rand(samples)
    torch.testing.assert_close(rows_total(rows, weights), weights @ rows.float())
    rows = torch.randn(3, samples, 11).bfloat16()
    torch.testing.assert_close(positions_total(rows), rows.float().sum(1))


def test_a_product_of_padded_rows_is_rounded_once() -> None:
    a, b = torch.randn(2, 9, 8).bfloat16(), torch.randn(2, 9, 16).bfloat16()[..., :13]
    exact = b.double().mT @ a.double()
    found = outer_dense(a.to(DEVICE), b.to(DEVICE)).double().cpu()
    assert found.shape == (2, 13, 8)
    torch.testing.assert_close(found, exact.bfloat16().double(), rtol=2.0**-7, atol=1e-6)
