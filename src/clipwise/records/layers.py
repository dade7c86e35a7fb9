"""Each operation that a parameter can take part in → taps and records. The only file that knows conv2d from linear.

Receives: a call, with where its tensors hold samples, and the tape to write on.
Gives: the call's output, tapped; LAYERS maps functions to handlers, and what is not in it goes through vmap.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records import planner, recurrent
from clipwise.records.displacement import Own, cut
from clipwise.records.kinds import Convolution, Dense, Geometry, Indexed, Outer, Record, outer_form, wide
from clipwise.records.tape import (
    Call,
    Rows,
    Source,
    Tape,
    Want,
    by_sample,
    by_unit,
    from_units,
    mapped,
    tensors,
    vmapped,
)
from clipwise.types import InputError, Refused


class Meeting:
    """One call under way: its tape, its sources, and where its tensors hold samples."""

    def __init__(self, tape: Tape, call: Call, sources: dict[int, Source], args: tuple[Any, ...], kwargs: Any) -> None:
        self.tape, self.call, self.args, self.kwargs = tape, call, args, kwargs
        self._sources = sources
        self._rows = {id(t): rows for t, rows in zip(tensors(args, kwargs), call.arguments, strict=True)}

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.tape.samples

    def source(self, value: object) -> Source | None:
        """The argument's source, if it is made of parameters."""
        found = self._sources.get(id(value))
        # only a matrix product can undo a transpose; elsewhere it is a tensor made from the parameter
        if found is None or not found.flipped:
            return found
        return replace(found, flipped=False, own=found.own.turned() if found.own is not None else None)

    def factor(self, value: object) -> Source | None:
        """The same for a matrix product, where a parameter's transpose is as good as the parameter."""
        return self._sources.get(id(value))

    def rows(self, value: Tensor) -> Rows | None:
        """Where an argument holds samples."""
        return self._rows[id(value)]

    @property
    def out(self) -> Rows:
        """Where the output holds samples."""
        rows = self.call.outputs[0] if self.call.outputs else None
        if rows is None:
            raise Refused(mixing(self.call.label))
        return rows

    def own(self, argument: object) -> Own | None:
        """What each unit has in the argument's place, in a displaced pass."""
        source = self.source(argument)
        return None if source is None else source.own

    @property
    def half(self) -> torch.dtype | None:
        """The half precision of displaced arguments, if they have one: a displacement would be rounded away in it."""
        half = (torch.bfloat16, torch.float16)
        given = tensors(self.args, self.kwargs)
        return next((t.dtype for t in given if t.dtype in half and self.own(t) is not None), None)

    def each(self, argument: Tensor) -> Tensor:
        """What each sample has in a parameter's place, [sample, *shape]: its own, or the same without any copy."""
        own = self.own(argument)
        if own is not None:
            return own.each
        shared = argument.detach().expand(self.samples, *argument.shape)
        return shared if self.half is None else wide(shared)

    def narrowed(self, result: Tensor) -> Tensor:
        """What an operation gives in the format that it would have without displacement, computed in a wider one."""
        half = self.half
        others = (t.dtype for t in tensors(self.args, self.kwargs) if t.dim() and t.is_floating_point())
        return result if half is None or any(dtype != half for dtype in others) else result.to(half)

    def placed(self, values: Tensor, dimensions: int) -> Tensor:
        """Values [sample, *shape] broadcast to so many dimensions, with samples where the output holds them."""
        out, sizes = self.out, values.shape[1:]
        values = values.reshape(len(values), *(1,) * (dimensions - len(sizes)), *sizes).movedim(0, out.dim)
        spread = list(values.shape)  # [..., sample, 1, ...]
        spread[out.dim + 1] = out.factor
        return values.expand(spread).flatten(out.dim, out.dim + 1)

    def value(self, argument: Any) -> Any:
        """The argument as the operation sees it: parameters detached, so that no weight gradient is computed."""
        return argument.detach() if self.source(argument) is not None else argument

    def tap(self, output: Tensor, inputs: Sequence[Tensor], wants: Sequence[Want | None]) -> Tensor:
        """The output with the taps that are wanted."""
        return self.tape.tap(output, inputs, [w for w in wants if w is not None])


def mixing(operation: str) -> str:
    """The message for an operation after which samples cannot be told apart."""
    return (
        f"{operation} with a trainable parameter mixes the samples of a batch: expected an output with one part per "
        "sample, got one that all samples share; compute each sample's value on its own, or freeze the parameter"
    )


def _summed(source: Source | None, output: Tensor, rows: Rows, keep: Callable[[Tensor], Tensor]) -> Want | None:
    """A parameter that is added to the output: its per-sample gradient is b, summed over positions by ``keep``."""
    if source is None:
        return None
    shape = (-1, *source.tensor.shape)
    return Want(
        source,
        (output.shape[rows.dim] // rows.factor, *source.tensor.shape),
        wide(output).dtype,
        lambda b, *_: keep(b).reshape(shape),
        Dense,
    )


# ── products with a weight ──────────────────────────────────────────────────────────────────────────────────────────


def _linear(m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, *, flip: bool, output: Tensor) -> Tensor:
    """y = x Wᵀ + bias with W [q, p]: v_i = Σ_s b_is a_isᵀ. ``flip``: the tensor given is Wᵀ."""
    rows, n = m.rows(x), m.samples
    source, wants = m.factor(weight), list[Want | None]()
    features, saved = output.shape[-1], list[Tensor]()
    if source is not None:
        if rows is None:
            raise Refused(mixing(m.call.label))
        a = as_seen(cut(by_sample(x, rows, n)).reshape(n, 1, -1, x.shape[-1]), output)
        positions, q = a.shape[2], features
        form = outer_form(a, q, output.dtype)
        swap = flip != source.flipped  # the parameter is [p, q]: its gradient is Σ a bᵀ
        shape = source.tensor.t().shape if source.flipped else source.tensor.shape
        out = m.out

        def record(a: Tensor, b: Tensor) -> Outer:
            b = by_sample(b, out, n).reshape(n, 1, positions, q)
            return Outer(b, a, shape) if swap else Outer(a, b, shape)

        if m.tape.writes(form, source):
            dtype = torch.promote_types(wide(a).dtype, wide(output).dtype)
            wants.append(Want(source, (n, *shape), dtype, lambda b, a: record(a, b).dense(), Dense))
            saved = [a]
        else:
            wants.append(Want(source, output.shape, output.dtype, _identity, functools.partial(record, a)))
        m.tape.site([source], m.call.label, form)
    out_rows = m.out
    keep = lambda b: wide(by_sample(b, out_rows, n)).reshape(n, -1, features).sum(1)  # noqa: E731
    return m.tap(output, saved, [*wants, _summed(m.source(bias), output, out_rows, keep)])


def as_seen(x: Tensor, output: Tensor) -> Tensor:
    """The input in the format that the product saw: under autocast it was narrowed first, and so is its gradient's."""
    return x.to(output.dtype) if output.dtype in (torch.bfloat16, torch.float16) else x


def _identity(b: Tensor, *_: Tensor) -> Tensor:
    return b


def linear(m: Meeting, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    if m.source(input) is not None or weight.dim() != 2:
        return by_vmap(m)
    output = _product(m, input, weight, bias, lambda offset: F.linear(input, m.value(weight), offset), flip=False)
    return _linear(m, input, weight, bias, flip=False, output=output)


def matmul(m: Meeting, input: Tensor, other: Tensor, *, out: None = None) -> Tensor:
    """X @ W with a two-dimensional W."""
    if m.source(input) is not None or other.dim() != 2 or input.dim() < 2 or m.source(other) is None:
        return by_vmap(m)
    output = _product(m, input, other, None, lambda _: input @ m.value(other), flip=True)
    return _linear(m, input, other, None, flip=True, output=output)


def addmm(m: Meeting, bias: Tensor, input: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Bias + X @ W: the Conv1D of GPT-2."""
    if m.source(input) is not None or (beta, alpha) != (1, 1) or bias.dim() != 1:
        return by_vmap(m)
    output = _product(
        m,
        input,
        other,
        bias,
        lambda offset: input @ m.value(other) if offset is None else torch.addmm(offset, input, m.value(other)),
        flip=True,
    )
    return _linear(m, input, other, bias, flip=True, output=output)


def _product(
    m: Meeting,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plain: Callable[[Tensor | None], Tensor],
    *,
    flip: bool,
) -> Tensor:
    """``plain(bias)``; in a displaced pass with each unit's own weight and bias."""
    source, offset, rows = m.factor(weight), m.own(bias), m.rows(x)
    own = source.own if source is not None else None
    if (own is None and offset is None) or rows is None:
        return plain(m.value(bias))
    units = m.samples // (own or offset).views  # type: ignore[union-attr]
    inputs = wide(by_unit(x, rows, units))
    turned = source is not None and flip != source.flipped  # the parameter is [p, q]
    added = None if offset is None else cut(offset.value)[:, None]
    if own is None or own.factored:
        base = plain(m.value(bias) if offset is None else None)
        with full_precision(x):
            y = wide(by_unit(base, rows, units))
            y = y if own is None else own.product(y, inputs, turned=turned)
            y = y if added is None else y + added
        return from_units(y, rows, x.shape).to(base.dtype)
    with full_precision(x):
        values = cut(own.value) if turned else cut(own.value).mT
        if added is None and bias is not None:
            added = wide(m.value(bias))
        y = inputs @ values if added is None else torch.baddbmm(added, inputs, values)
    return from_units(y, rows, x.shape).to(seen_format(x))


def full_precision(like: Tensor) -> torch.autocast:
    """Without autocast: a displacement is small beside what it moves, so it is computed in float32 and then cast."""
    return torch.autocast(like.device.type, enabled=False)


def seen_format(x: Tensor) -> torch.dtype:
    """The format in which a product of x comes out."""
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrow else x.dtype


# ── convolutions ────────────────────────────────────────────────────────────────────────────────────────────────────


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
    x = input
    if isinstance(padding, str):
        if padding == "same":  # as torch does: the odd one goes to the right
            totals = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
            x = F.pad(x, [side for t in reversed(totals) for side in (t // 2, t - t // 2)])
        pads = (0,) * space
    else:
        pads = _tuple(padding, space)
    geometry = Geometry(weight.shape, steps, pads, spread, groups)
    run = lambda x, w, b, groups: m.call.function(x, w, b, steps, pads, spread, groups)  # noqa: E731
    output = _kernel(m, x, weight, bias, groups, run)
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
    run = lambda x, w, b, groups: m.call.function(x, w, b, steps, pads, more, groups, spread)  # noqa: E731
    output = _kernel(m, input, weight, bias, groups, run)
    return _convolved(m, input, weight, bias, geometry, output, transposed=True)


def _kernel(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, run: Callable[..., Tensor]
) -> Tensor:
    """The convolution; in a displaced pass one with a group for each unit, so that each has its own weight."""
    own, offset = m.own(weight), m.own(bias)
    if own is None:
        if offset is None:
            return run(x, m.value(weight), m.value(bias), groups)
        y = run(x, m.value(weight), None, groups)
        return (wide(y) + m.placed(offset.each.unflatten(1, (-1, *(1,) * (x.dim() - 2))), x.dim())).to(y.dtype)
    units, views = m.samples // own.views, own.views * m.out.factor
    with full_precision(x):
        added: Tensor | None = None
        if bias is not None:
            added = cut(offset.value).flatten() if offset is not None else wide(m.value(bias)).repeat(units)
        images = wide(x).unflatten(0, (units, views)).transpose(0, 1)  # [view, unit, channel, …]
        values = cut(own.value)
        share = _share(values, groups)
        if share > 1:
            rest = -units % share
            images, values = _more(images, 1, rest), _diagonal(_more(values, 0, rest), share)
            added = None if added is None else _more(added.unflatten(0, (units, -1)), 0, rest).flatten()
        y = run(images.flatten(1, 2), values.flatten(0, 1), added, len(values) * groups)
        y = y.unflatten(1, (len(values) * share, -1))[:, :units].transpose(0, 1).flatten(0, 1)
    return y.to(seen_format(x))


FULL = 64  # channels; with fewer in a group a GPU's convolution is an order of magnitude slower (measured on an H200)


def _share(values: Tensor, groups: int) -> int:
    """How many units share a group of a displaced convolution, their weights along its diagonal."""
    inputs, outputs = values.shape[1:3]
    return max(1, FULL // max(inputs, outputs)) if values.is_cuda and groups == 1 and min(inputs, outputs) >= 8 else 1


def _more(tensor: Tensor, dim: int, count: int) -> Tensor:
    """The tensor with so many zeros at the end of a dimension."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, count]) if count else tensor


def _diagonal(values: Tensor, share: int) -> Tensor:
    """Weights [unit, channel, channel, …] of ``share`` units as the diagonal blocks of one."""
    space = (1,) * (values.dim() - 3)
    eye = torch.eye(share, dtype=values.dtype, device=values.device).reshape(share, 1, share, 1, *space)
    blocks = values.unflatten(0, (-1, share)).unsqueeze(3) * eye  # [group, share, channel, share, channel, …]
    return blocks.flatten(3, 4).flatten(1, 2)


def _convolved(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, output: Tensor, *, transposed: bool
) -> Tensor:
    n, factor, source = m.samples, m.out.factor, m.source(weight)
    x = as_seen(cut(x), output)
    wants, saved = list[Want | None](), list[Tensor]()
    if source is not None:

        def record(x: Tensor, b: Tensor) -> Record:
            conv = Convolution(b, x, geometry) if transposed else Convolution(x, b, geometry)
            return conv if factor == 1 else conv.merged(factor)  # several images of one sample are one unit

        form = (Convolution(output.detach(), x, geometry) if transposed else Convolution(x, output, geometry)).form
        if m.tape.writes(form, source):
            dtype = torch.promote_types(wide(x).dtype, wide(output).dtype)
            written = lambda b, x: record(x, b).dense()  # noqa: E731
            wants.append(Want(source, (n, *geometry.shape), dtype, written, Dense))
            saved = [x]
        else:
            wants.append(Want(source, output.shape, output.dtype, _identity, functools.partial(record, x)))
        m.tape.site([source], m.call.label, form)
    channels = output.shape[1]
    keep = lambda b: wide(b).flatten(2).sum(2).reshape(n, factor, channels).sum(1)  # noqa: E731
    return m.tap(output, saved, [*wants, _summed(m.source(bias), output, m.out, keep)])


def _tuple(value: int | Sequence[int], length: int) -> tuple[int, ...]:
    values = (value,) * length if isinstance(value, int) else tuple(value)
    return values * length if len(values) == 1 else values


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def refuse_embedding(names: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse tables that a look-up changes, or whose gradient depends on other samples; called before any look-up."""
    if max_norm is not None:
        raise Refused(
            f"the embedding {names} has max_norm={max_norm}: it rewrites the rows that this batch looked up, without "
            "noise; write max_norm=None"
        )
    if scale_grad_by_freq:
        raise Refused(
            f"the embedding {names} has scale_grad_by_freq=True: a sample's gradient then depends on how often the "
            "other samples use a row; write scale_grad_by_freq=False"
        )


def embedding(
    m: Meeting,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding: row ids_is of the table receives b_is."""
    source, rows, n = m.source(weight), m.rows(input), m.samples
    if source is None or rows is None:
        return by_vmap(m)
    ids = by_sample(input, rows, n).reshape(n, -1)
    output = _looked_up(m, ids, F.embedding(input, m.value(weight)), source.own)
    table, out = weight.shape, m.out

    def record(b: Tensor) -> Record:
        b = by_sample(b, out, n).reshape(n, -1, table[1])
        if padding_idx is not None:
            b = b * (ids != padding_idx % table[0])[:, :, None]
        indexed = Indexed(ids, b, table)
        return indexed if source.name is not None or m.tape.dual else Dense(indexed.dense())

    m.tape.site([source], "embedding", None)
    return m.tap(output, [], [Want(source, output.shape, output.dtype, _identity, record)])


def _looked_up(m: Meeting, ids: Tensor, rows: Tensor, own: Own | None) -> Tensor:
    """Rows of the table; in a displaced pass of each unit's own."""
    if own is None:
        return rows
    units = m.samples // own.views
    ids = ids.reshape(units, -1)
    if own.factored:
        return from_units(wide(by_unit(rows, m.out, units)) + own.rows(ids), m.out, rows.shape).to(rows.dtype)
    found = cut(own.value).gather(1, ids[:, :, None].expand(-1, -1, rows.shape[-1]))
    return from_units(found, m.out, rows.shape).to(rows.dtype)


def embedding_bag(follow: Any, *args: Any, **kwargs: Any) -> Tensor:
    """F.embedding_bag as a look-up and a reduction, so that the table's records are those of an embedding.

    Bags of unequal length (a flat input with offsets) are padded to the longest; the padding adds nothing.
    """
    given = {**dict(zip(inspect.signature(F.embedding_bag).parameters, args, strict=False)), **kwargs}
    ids, weight, offsets = given["input"], given["weight"], given.get("offsets")
    mode, scale, padding_idx = given.get("mode", "mean"), given.get("per_sample_weights"), given.get("padding_idx")
    if offsets is not None:
        if not given.get("include_last_offset"):
            offsets = torch.cat([offsets, offsets.new_tensor([ids.shape[0]])])
        lengths = offsets.diff()
        place = torch.arange(int(lengths.max()) if len(lengths) else 0, device=ids.device)
        real = place < lengths[:, None]  # [bag, place]
        flat = (offsets[:-1, None] + place).clamp(max=max(ids.shape[0] - 1, 0))
        ids = ids[flat]
        scale = None if scale is None else scale[flat]
    else:
        real = torch.ones_like(ids, dtype=torch.bool)
    if padding_idx is not None:
        real = real & (ids != padding_idx % weight.shape[0])
    options = {key: given[key] for key in ("max_norm", "scale_grad_by_freq") if given.get(key)}
    rows = follow.call(F.embedding, (ids, weight), options)  # [bag, place, feature]
    if mode == "max":
        largest = rows.masked_fill(~real[:, :, None], -math.inf).amax(1)
        return torch.where(real.any(1)[:, None], largest, torch.zeros_like(largest))
    if scale is not None:
        rows = rows * scale[:, :, None]
    total = torch.where(real[:, :, None], rows, torch.zeros_like(rows)).sum(1)
    return total if mode == "sum" else total / real.sum(1).clamp(min=1)[:, None]


# ── normalisations: the affine parameters' gradients are dense and fall out of the backward ───────────────────────────


def _affine(
    m: Meeting,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    run: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    keep: Callable[[Tensor], Tensor],
    trailing: int = 0,
) -> Tensor:
    """y = x̂ ⊙ w + bias: the gradient of w is Σ_s x̂_s ⊙ b_s; x̂ is made again in the backward, as it is cheap.

    ``run(x, w, bias)`` is the normalisation; ``trailing`` dimensions follow the parameters' own.
    """
    source = m.source(weight)
    if m.own(weight) is None and m.own(bias) is None:
        output = run(input, m.value(weight), m.value(bias))
    else:
        plain = run(input, None, None)
        output = wide(plain)
        for parameter, apply in ((weight, torch.mul), (bias, torch.add)):
            if parameter is not None:
                own = wide(m.each(parameter)).reshape(m.samples, *parameter.shape, *(1,) * trailing)
                output = apply(output, m.placed(own, plain.dim()))
        output = output.to(plain.dtype)
    scale = _summed(source, output, m.out, keep)
    if scale is not None:
        scale = Want(
            scale.source,
            scale.shape,
            scale.dtype,
            lambda b, x: keep(wide(b) * run(wide(x), None, None)).reshape(scale.shape),
            Dense,
        )
    found = [s for s in (source, m.source(bias)) if s is not None]
    m.tape.site(found, m.call.label, None)
    return m.tap(output, [input], [scale, _summed(m.source(bias), output, m.out, keep)])


def layer_norm(
    m: Meeting,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """F.layer_norm."""
    out, n, shape = m.out, m.samples, tuple(normalized_shape)
    return _affine(
        m,
        input,
        weight,
        bias,
        lambda x, w, b: F.layer_norm(x, shape, w, b, eps),
        lambda t: wide(by_sample(t, out, n)).reshape(n, -1, *shape).sum(1),
    )


def rms_norm(
    m: Meeting,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm."""
    out, n, shape = m.out, m.samples, tuple(normalized_shape)
    # the default epsilon is the input format's, which the backward's wider copy must not change
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(
        m,
        input,
        weight,
        None,
        lambda x, w, _: F.rms_norm(x, shape, w, eps),
        lambda t: wide(by_sample(t, out, n)).reshape(n, -1, *shape).sum(1),
    )


def _channels(
    m: Meeting, input: Tensor, weight: Tensor | None, bias: Tensor | None, run: Callable[..., Tensor]
) -> Tensor:
    """A normalisation whose parameters belong to channels."""
    n, factor, channels = m.samples, m.out.factor, input.shape[1]
    keep = lambda t: wide(t).reshape(n, factor, channels, -1).sum((1, 3))  # noqa: E731
    return _affine(m, input, weight, bias, run, keep, trailing=input.dim() - 2)


def group_norm(
    m: Meeting,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """F.group_norm."""
    return _channels(m, input, weight, bias, lambda x, w, b: F.group_norm(x, num_groups, w, b, eps))


def instance_norm(
    m: Meeting,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm; running statistics are only read (what would update them is refused beforehand)."""
    mean, var = (None, None) if use_input_stats else (running_mean, running_var)
    run = functools.partial(F.instance_norm, use_input_stats=use_input_stats, eps=eps)
    return _channels(m, input, weight, bias, lambda x, w, b: run(x, mean, var, w, b))


def batch_norm(
    m: Meeting,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm with fixed statistics; with the batch's own it mixes samples."""
    if training or running_mean is None:
        raise Refused(
            "batch normalisation with the batch's own statistics mixes the samples of a batch; write nn.GroupNorm "
            "instead, or call .eval() on the module to use its fixed statistics"
        )
    run = functools.partial(F.batch_norm, training=False, eps=eps)
    return _channels(m, input, weight, bias, lambda x, w, b: run(x, running_mean, running_var, w, b))


# ── recurrences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def recurrence(m: Meeting, ahead: Tensor, h: Tensor, *rest: Any) -> Any:
    """recurrent.lstm and gru: with b the gradient at W_hh h + b_hh of every step, v_i = Σ_t b_it h_i,t−1ᵀ."""
    (*cell, weight, bias) = rest
    source, n = m.source(weight), m.samples
    if m.out.dim != 1 or m.out.factor != 1 or any(m.source(t) is not None for t in (ahead, h, *cell)):
        return by_vmap(m)
    seen = ahead.dtype
    if m.own(weight) is not None or m.own(bias) is not None:
        ahead, h, cell = wide(ahead), wide(h), [wide(c) for c in cell]
    tap = ahead.new_zeros(()).expand_as(ahead).requires_grad_()
    run: Any = STEPPED[m.call.function] if m.tape.dual else recurrent.lstm_tapped if cell else recurrent.gru_tapped
    offset = m.value(bias) if m.own(bias) is None else m.each(bias)
    result = run(ahead, h, *cell, m.value(weight), offset, tap, *_own_recurrence(m, ahead, weight))
    result = mapped(result, lambda t: t.to(seen))
    states = cut(result[0] if cell else result)
    start = cut(h)[None].expand(1, n, -1)

    def weights(b: Tensor) -> Outer:
        a = torch.cat([start, states[:-1]]).transpose(0, 1)[:, None]
        return Outer(a, b.transpose(0, 1)[:, None], weight.shape)

    if source is not None:
        m.tape.leaf(tap, source, lambda b: _or_written(m.tape, weights(b), source))
        m.tape.site([source], m.call.label, planner.choose(len(ahead), h.shape[-1], ahead.shape[-1]))
    added = m.source(bias)
    if added is not None:
        m.tape.leaf(tap, added, lambda b: Dense(wide(b).sum(0)))
    return result


# Frozen or not, in a dual pass a recurrence runs by ordinary operations.
STEPPED: dict[Callable[..., Any], Callable[..., Any]] = {
    recurrent.lstm: recurrent.lstm_stepped,
    recurrent.gru: recurrent.gru_stepped,
}


def _own_recurrence(m: Meeting, ahead: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Each unit's recurrent weight, as the recurrence takes it: values, or pairs beside the shared weight."""
    own = m.own(weight)
    if own is None:
        return ()
    found = own.pairs() if own.factored else (cut(own.value),)
    return tuple(t.to(ahead.dtype) for t in found)


def _or_written(tape: Tape, record: Outer, source: Source) -> Record:
    return Dense(record.dense()) if tape.writes(record.form, source) else record


# ── parameters used directly ────────────────────────────────────────────────────────────────────────────────────────

_ARITHMETIC = "add sub mul div true_divide pow maximum minimum where lerp floor_divide subtract multiply divide".split()
ELEMENTWISE = frozenset(
    {n for name in _ARITHMETIC for n in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")}
    | {"__truediv__", "__rtruediv__", "__itruediv__", "rsub"}
)
REPEATING = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile"})


def elementwise(m: Meeting) -> Tensor:
    """Arithmetic with broadcasting (x + position table, x * scale): the parameter enters once per sample."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors(m.args, m.kwargs)))
    spread = functools.partial(_spread, m, dimensions=len(shape))
    m.tape.site(_found(m), m.call.label, None)
    result: Tensor = m.call.function(*mapped(m.args, spread), **mapped(m.kwargs, spread))
    return m.narrowed(result)


def _spread(m: Meeting, argument: Tensor, *, dimensions: int) -> Tensor:
    """A parameter, broadcast to so many dimensions, with a leaf for each sample; other tensors as they are."""
    source = m.source(argument)
    if source is None:
        return argument
    leaf = cut(m.each(argument)).requires_grad_()
    return m.placed(m.tape.leaf(leaf, source, lambda g: Dense(wide(g))), dimensions)


def biased_attention(
    m: Meeting, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """F.scaled_dot_product_attention with a trained bias [head, query, key] as its mask."""
    if attn_mask is None or any(m.source(t) is not None for t in (query, key, value)):
        return by_vmap(m)
    m.tape.site(_found(m), m.call.label, None)
    bias = _spread(m, attn_mask, dimensions=query.dim()).to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, bias, *rest, **options)


def repeated(m: Meeting) -> Tensor:
    """A parameter given a sample dimension (a class token's expand): from here on it is data with a leaf per sample."""
    out = m.out
    (source, *_) = _found(m)
    made: Tensor = m.call.function(*m.args, **m.kwargs)
    first = made.narrow(out.dim, 0, out.factor)  # every sample's part is the same function of the parameter
    part = Source(first, source.names)
    n = m.samples

    def record(gradient: Tensor) -> Record:
        each = gradient.movedim(out.dim, 0).reshape(n, out.factor, *gradient.movedim(out.dim, 0).shape[1:])
        return Dense(wide(each.movedim(1, out.dim + 1)))

    m.tape.site([source], m.call.label, None)
    if source.own is not None:
        own = source.own

        def one(*args: Any, **kwargs: Any) -> Tensor:
            repeats: Tensor = m.call.function(*args, **kwargs)
            return repeats.narrow(out.dim, 0, out.factor)

        values = vmapped(one, m.args, m.kwargs, lambda t: (own.value, 0) if m.source(t) else (t, None), "same")
        part = replace(part, own=Own(own.views, lambda: values))  # [unit, ..., factor, ...]
        made = part.own.each.movedim(0, out.dim).flatten(out.dim, out.dim + 1).to(made.dtype)  # type: ignore[union-attr]
    return m.tape.leaf(cut(made).requires_grad_(), part, record)


def by_vmap(m: Meeting) -> Any:
    """Any other operation: run once per sample, as on a batch of one, with the sample's own copy of the parameter."""
    n = m.samples
    found = _found(m)

    def place(argument: Tensor) -> tuple[Tensor, int | None]:
        source, rows = m.source(argument), m.rows(argument)
        if source is not None:
            leaf = cut(m.each(argument)).requires_grad_()
            return m.tape.leaf(leaf, source, lambda g: Dense(wide(g))), 0
        if m.half is not None:  # the operation sees one format
            argument = wide(argument)
        if rows is not None:
            # [..., sample, factor, ...]: mapped over the first, the operation sees a batch of one
            return argument.unflatten(rows.dim, (n, rows.factor)), rows.dim
        return argument, None

    names = ", ".join(sorted({name for s in found for name in s.names}))
    try:
        result = vmapped(m.call.function, m.args, m.kwargs, place, "different")
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"cannot follow the parameter {names} through {m.call.label} one sample at a time "
            f"({str(error).splitlines()[0]}); use it through a torch.nn layer or arithmetic, or freeze it"
        ) from error
    m.tape.site(found, m.call.label, None, fallback=True)
    outputs = iter(m.call.outputs)

    def joined(value: Tensor) -> Tensor:
        rows = next(outputs)
        if rows is None:
            raise Refused(mixing(m.call.label))
        return m.narrowed(value.movedim(0, rows.dim).flatten(rows.dim, rows.dim + 1))

    return mapped(result, joined)


def _found(m: Meeting) -> list[Source]:
    return [s for t in tensors(m.args, m.kwargs) if (s := m.source(t)) is not None]


LAYERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys([torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__], matmul),
    **dict.fromkeys([torch.conv1d, torch.conv2d, torch.conv3d], convolution),
    **dict.fromkeys([torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d], transposed_convolution),
    F.embedding: embedding,
    **dict.fromkeys([F.layer_norm, torch.layer_norm], layer_norm),
    **dict.fromkeys([F.rms_norm, torch.rms_norm], rms_norm),
    **dict.fromkeys([F.group_norm, torch.group_norm], group_norm),
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    F.scaled_dot_product_attention: biased_attention,
    recurrent.lstm: recurrence,
    recurrent.gru: recurrence,
}


def meet(m: Meeting) -> Any:
    """Send a call to its handler."""
    handler = LAYERS.get(m.call.function)
    if handler is not None:
        return handler(m, *m.args, **m.kwargs)
    if m.call.label in ELEMENTWISE:
        return elementwise(m)
    if m.call.label in REPEATING and len(_found(m)) == 1:
        return repeated(m)
    return by_vmap(m)
