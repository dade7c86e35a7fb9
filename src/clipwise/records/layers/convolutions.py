"""Convolutions in one, two and three dimensions, and transposed ones.

Receives: a Meeting and the arguments of the call.
Gives: the output, tapped so that the weight's record is the input beside b or, where that is cheaper, written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records.displacement import Own, cut
from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds import Convolution, Dense, Geometry, full_precision, wide, wide_format
from clipwise.records.kinds.convolution import patches
from clipwise.records.layers.fallback import by_vmap
from clipwise.records.layers.meeting import Meeting, added_to, identity, seen_format
from clipwise.records.tape import Want


def convolution(
    m: Meeting,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """F.conv1d, conv2d, conv3d."""
    space = weight.dim() - 2
    if m.source(input) is not None or m.rows(input) is None or m.out.dim != 0 or input.dim() != space + 2:
        return by_vmap(m)
    steps, spread = _tuple(stride, space), _tuple(dilation, space)
    x = m.cast(input, seen_format(input))
    if isinstance(padding, str):
        if padding == "same":  # as torch does: the odd one goes to the right
            totals = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
            x = F.pad(x, [side for t in reversed(totals) for side in (t // 2, t - t // 2)])
        pads = (0,) * space
    else:
        pads = _tuple(padding, space)
    geometry = Geometry(weight.shape, steps, pads, spread, groups)
    run = lambda x, w, b, groups: m.call.function(x, w, b, steps, pads, spread, groups)
    own = _apart(m, weight, geometry)
    if own is None:
        output = _kernel(m, x, weight, bias, groups, run)
    else:
        output = _shared(m, x, weight, bias, groups, run)
        with full_precision(x):
            moved: Tensor = _Displacement.apply(x, own, geometry, m.samples // own.views)  # type: ignore[no-untyped-call]
            output = (output + moved).to(output.dtype)
    return _convolved(m, x, weight, bias, geometry, output, transposed=False)


def transposed_convolution(
    m: Meeting,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """F.conv_transpose1d, 2d, 3d: ⟨convᵀ(x, W), b⟩ = ⟨x, conv(b, W)⟩, so x and b change places in the record."""
    space = weight.dim() - 2
    if m.source(input) is not None or m.rows(input) is None or m.out.dim != 0 or input.dim() != space + 2:
        return by_vmap(m)
    steps, pads, spread, more = (_tuple(v, space) for v in (stride, padding, dilation, output_padding))
    geometry = Geometry(weight.shape, steps, pads, spread, groups)
    run = lambda x, w, b, groups: m.call.function(x, w, b, steps, pads, more, groups, spread)
    x = m.cast(input, seen_format(input))
    output = _kernel(m, x, weight, bias, groups, run)
    return _convolved(m, x, weight, bias, geometry, output, transposed=True)


def _kernel(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, run: Callable[..., Tensor]
) -> Tensor:
    """The convolution; in a displaced pass one with a group for each unit, so that each has its own weight."""
    own = m.own(weight)
    if own is None:
        return _shared(m, x, weight, bias, groups, run)
    units, views = m.samples // own.views, own.views * m.out.factor
    with full_precision(x):
        added = _added(m, bias, units)
        added = None if added is None else added.flatten()
        images = wide(x).unflatten(0, (units, views)).transpose(0, 1)  # [view, unit, channel, …]
        values = own.lent
        share = _share(x, values.shape[1:]) if groups == 1 else 1
        if share > 1:
            rest = -units % share
            images, values = _more(images, 1, rest), _diagonal(_more(values, 0, rest), share)
            added = None if added is None else _more(added.unflatten(0, (units, -1)), 0, rest).flatten()
        y = run(images.flatten(1, 2), values.flatten(0, 1), added, len(values) * groups)
        y = y.unflatten(1, (len(values) * share, -1))[:, :units].transpose(0, 1).flatten(0, 1)
    return y.to(seen_format(x))


def _shared(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, run: Callable[..., Tensor]
) -> Tensor:
    """The convolution with one weight for all, and each unit's own bias."""
    offset = m.own(bias)
    if offset is None:
        return run(x, m.value(weight), m.value(bias), groups)
    y = run(x, m.value(weight), None, groups)
    return (wide(y) + m.placed(offset.each.unflatten(1, (-1, *(1,) * (x.dim() - 2))), x.dim())).to(y.dtype)


def _added(m: Meeting, bias: Tensor | None, units: int) -> Tensor | None:
    """Each unit's bias, [unit, channel]."""
    if bias is None:
        return None
    offset = m.own(bias)
    return wide(m.value(bias)).expand(units, -1) if offset is None else cut(offset.value)


FULL = 64  # channels; with fewer in a group a GPU's convolution is an order of magnitude slower (measured on an H200)


def _share(x: Tensor, shape: torch.Size) -> int:
    """How many units share a group of a displaced convolution, their weights along its diagonal."""
    return max(1, FULL // max(shape[:2])) if x.is_cuda and min(shape[:2]) >= 8 else 1


def _more(tensor: Tensor, dim: int, count: int) -> Tensor:
    """The tensor with so many zeros at the end of a dimension."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, count]) if count else tensor


def _diagonal(values: Tensor, share: int) -> Tensor:
    """Weights [unit, channel, channel, …] of ``share`` units as the diagonal blocks of one."""
    space = (1,) * (values.dim() - 3)
    eye = torch.eye(share, dtype=values.dtype, device=values.device).reshape(share, 1, share, 1, *space)
    blocks = values.unflatten(0, (-1, share)).unsqueeze(3) * eye  # [group, share, channel, share, channel, …]
    return blocks.flatten(3, 4).flatten(1, 2)


WRITTEN = 1 << 28  # numbers of a layer's weights and patches at a time, half a gigabyte in half precision
PIECES = 2  # at most: a GPU's small convolutions take no longer than their launches


def _apart(m: Meeting, weight: Tensor, geometry: Geometry) -> Own | None:
    """Each unit's own weight where θ's part of the convolution and the displacement's are computed apart."""
    own = m.own(weight)
    plain = geometry.groups == 1 and len(geometry.stride) <= 2
    return own if own is not None and own.direction is not None and plain and not m.tape.dual else None


class _Displacement(torch.autograd.Function):
    """The convolution of x with c v, a product with patches: [image, channel, *space], in the format of x.

    Nothing but v is kept for the backward pass; a v too large for that is written once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Own, geometry: Geometry, units: int) -> Tensor:
        views, out = x.shape[0] // units, _out(x, geometry)
        step = _step(units, geometry, views * out.numel())
        ctx.own, ctx.geometry, ctx.views, ctx.step, ctx.like = own, geometry, views, step, (x.shape, x.dtype)

        def piece(images: Tensor, start: int) -> Tensor:
            v = _direction(own, start, start + len(images) // views, x.dtype)
            return _images(torch.bmm(v, _patches(images.to(v.dtype), geometry, views)), views)

        y = _pieces(x, step * views, lambda images, row: piece(images, row // views))
        return _scale_(y, own).to(x.dtype).unflatten(2, out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 4
        (shape, dtype), g, views = ctx.like, ctx.geometry, ctx.views
        line = 2 - len(g.stride)  # torch folds planes only
        plain = ((1, shape[2:]), (1, g.shape[2:]), (1, g.dilation), (0, g.padding), (1, g.stride))
        sizes = [(*(rest,) * line, *size) for rest, size in plain]

        def piece(b: Tensor, start: int) -> Tensor:
            v = _direction(ctx.own, start, start + len(b) // views, dtype)
            return F.fold(_images(torch.bmm(v.mT, _by_unit(b.to(v.dtype), views)), views), *sizes)

        with full_precision(gradients[0]):
            x = _pieces(gradients[0].flatten(2), ctx.step * views, lambda b, row: piece(b, row // views))
            x = _scale_(x, ctx.own).to(dtype)
        return (x.reshape(shape), *(None,) * 3)


def _direction(own: Own, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """v [unit, channel, p] of some units: in the format of x where that is its own, else wide."""
    assert own.direction is not None
    v = own.direction(start, stop).flatten(2)
    return v if v.dtype == dtype else wide(v)


def _scale_(images: Tensor, own: Own) -> Tensor:
    """The images [image, …] times their units' c, in place."""
    assert own.factors is not None
    images.view(len(own.factors), -1).mul_(own.factors)
    return images


def _pieces(rows: Tensor, size: int, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The function of so many rows at a time, which also learns where they begin, put together again."""
    if size >= len(rows):
        return function(rows, 0)
    return torch.cat([function(part, i * size) for i, part in enumerate(rows.split(size))])


def _step(units: int, geometry: Geometry, positions: int) -> int:
    """How many units' weights and patches are written at a time."""
    floats = geometry.shape[1:].numel() * (geometry.shape[0] + positions)
    return max(WRITTEN // floats, -(-units // PIECES))


def _out(x: Tensor, g: Geometry) -> torch.Size:
    """The size of a convolution's output."""
    sizes = zip(x.shape[2:], g.shape[2:], g.stride, g.padding, g.dilation, strict=True)
    return torch.Size([(n + 2 * pad - spread * (k - 1) - 1) // step + 1 for n, k, step, pad, spread in sizes])


def _patches(x: Tensor, g: Geometry, views: int) -> Tensor:
    """What each output position sees, [unit, p, view · position]."""
    return _by_unit(patches(x, g).reshape(len(x), g.shape[1:].numel(), -1), views)


def _by_unit(y: Tensor, views: int) -> Tensor:
    """[image, channel, position] → [unit, channel, view · position]."""
    return y if views == 1 else y.unflatten(0, (-1, views)).transpose(1, 2).flatten(2)


def _images(y: Tensor, views: int) -> Tensor:
    """The inverse."""
    return y if views == 1 else y.unflatten(2, (views, -1)).transpose(1, 2).flatten(0, 1)


def _convolved(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, output: Tensor, *, transposed: bool
) -> Tensor:
    n, factor, source = m.samples, m.out.factor, m.source(weight)
    x = cut(x)
    wants, saved = list[Want | None](), list[Tensor]()
    if source is not None:

        def record(x: Tensor, b: Tensor) -> Convolution:
            conv = Convolution(b, x, geometry) if transposed else Convolution(x, b, geometry)
            return conv if factor == 1 else conv.merged(factor)  # several images of one sample are one unit

        likely = record(x, output)
        form = likely.counted if source.name is None else likely.form  # what is always written need not be measured
        if m.tape.writes(form, source):
            kept = source.name is not None  # what goes on through a Jacobian keeps its digits
            write = Convolution.written if kept else Convolution.dense
            dtype = likely.formats[1] if kept else wide_format(torch.promote_types(x.dtype, output.dtype))
            wants.append(Want(source, (n, *geometry.shape), dtype, lambda b, x: write(record(x, b)), Dense))
            saved = [x]
        else:
            pair = lambda b: record(_as_read(x), _as_read(b))  # once, for the norm and every sum
            wants.append(Want(source, output.shape, output.dtype, identity, pair))
        m.tape.site([source], m.call.label, form)
    channels = output.shape[1]
    keep = lambda b: wide(b).flatten(2).sum(2).reshape(n, factor, channels).sum(1)
    return m.tap(output, saved, [*wants, added_to(m.source(bias), output, m.out, keep)])


def _as_read(images: Tensor) -> Tensor:
    """As kernels read images on a GPU, channels last; a compiler sees to that by itself."""
    by_kernel = images.is_cuda and images.dtype in HALF and images.dim() == 4 and type(images) is Tensor
    return images.contiguous(memory_format=torch.channels_last) if by_kernel else images


def _tuple(value: int | Sequence[int], length: int) -> tuple[int, ...]:
    values = (value,) * length if isinstance(value, int) else tuple(value)
    return values * length if len(values) == 1 else values
