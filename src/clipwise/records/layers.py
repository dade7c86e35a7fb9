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
from clipwise.records.kinds import Convolution, Dense, Geometry, Indexed, Outer, Record, wide
from clipwise.records.tape import Call, Rows, Source, Tape, Want, by_sample, mapped, tensors
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
        return replace(found, flipped=False) if found is not None and found.flipped else found

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
        a = as_seen(by_sample(x, rows, n).detach().reshape(n, 1, -1, x.shape[-1]), output)
        positions, p, q = a.shape[2], a.shape[3], features
        form = planner.choose(positions, p, q)
        swap = flip != source.flipped  # the parameter is [p, q]: its gradient is Σ a bᵀ
        shape = source.tensor.t().shape if source.flipped else source.tensor.shape
        out = m.out

        def record(a: Tensor, b: Tensor) -> Outer:
            b = by_sample(b, out, n).reshape(n, 1, positions, q)
            return Outer(b, a, shape) if swap else Outer(a, b, shape)

        if form.name == "written" or source.name is None:
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
    output = F.linear(input, m.value(weight), m.value(bias))
    return _linear(m, input, weight, bias, flip=False, output=output)


def matmul(m: Meeting, input: Tensor, other: Tensor, *, out: None = None) -> Tensor:
    """X @ W with a two-dimensional W."""
    if m.source(input) is not None or other.dim() != 2 or input.dim() < 2 or m.source(other) is None:
        return by_vmap(m)
    return _linear(m, input, other, None, flip=True, output=input @ m.value(other))


def addmm(m: Meeting, bias: Tensor, input: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Bias + X @ W: the Conv1D of GPT-2."""
    if m.source(input) is not None or (beta, alpha) != (1, 1) or bias.dim() != 1:
        return by_vmap(m)
    output = torch.addmm(m.value(bias), input, m.value(other))
    return _linear(m, input, other, bias, flip=True, output=output)


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
    output = m.call.function(x, m.value(weight), m.value(bias), steps, pads, spread, groups)
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
    output = m.call.function(input, m.value(weight), m.value(bias), steps, pads, more, groups, spread)
    return _convolved(m, input, weight, bias, geometry, output, transposed=True)


def _convolved(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, output: Tensor, *, transposed: bool
) -> Tensor:
    n, factor, source = m.samples, m.out.factor, m.source(weight)
    x = as_seen(x.detach(), output)
    wants, saved = list[Want | None](), list[Tensor]()
    if source is not None:

        def record(x: Tensor, b: Tensor) -> Record:
            conv = Convolution(b, x, geometry) if transposed else Convolution(x, b, geometry)
            return conv if factor == 1 else conv.merged(factor)  # several images of one sample are one unit

        form = (Convolution(output.detach(), x, geometry) if transposed else Convolution(x, output, geometry)).form
        if form.name == "written" or source.name is None:
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
    output = F.embedding(input, m.value(weight))
    table, out = weight.shape, m.out

    def record(b: Tensor) -> Record:
        b = by_sample(b, out, n).reshape(n, -1, table[1])
        if padding_idx is not None:
            b = b * (ids != padding_idx % table[0])[:, :, None]
        indexed = Indexed(ids, b, table)
        return indexed if source.name is not None else Dense(indexed.dense())

    m.tape.site([source], "embedding", None)
    return m.tap(output, [], [Want(source, output.shape, output.dtype, _identity, record)])


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
    output: Tensor,
    standardised: Callable[[Tensor], Tensor],
    keep: Callable[[Tensor], Tensor],
) -> Tensor:
    """y = x̂ ⊙ w + bias: the gradient of w is Σ_s x̂_s ⊙ b_s; x̂ is made again in the backward, as it is cheap."""
    source = m.source(weight)
    scale = _summed(source, output, m.out, keep)
    if scale is not None:
        scale = Want(
            scale.source,
            scale.shape,
            scale.dtype,
            lambda b, x: keep(wide(b) * standardised(wide(x))).reshape(scale.shape),
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
        F.layer_norm(input, shape, m.value(weight), m.value(bias), eps),
        lambda x: F.layer_norm(x, shape, None, None, eps),
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
        F.rms_norm(input, shape, m.value(weight), eps),
        lambda x: F.rms_norm(x, shape, None, eps),
        lambda t: wide(by_sample(t, out, n)).reshape(n, -1, *shape).sum(1),
    )


def _per_channel(m: Meeting, output: Tensor) -> Callable[[Tensor], Tensor]:
    n, factor, channels = m.samples, m.out.factor, output.shape[1]
    return lambda t: wide(t).reshape(n, factor, channels, -1).sum((1, 3))


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
    output = F.group_norm(input, num_groups, m.value(weight), m.value(bias), eps)
    standardised = lambda x: F.group_norm(x, num_groups, None, None, eps)  # noqa: E731
    return _affine(m, input, weight, bias, output, standardised, _per_channel(m, output))


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
    output = run(input, mean, var, m.value(weight), m.value(bias))
    return _affine(m, input, weight, bias, output, lambda x: run(x, mean, var), _per_channel(m, output))


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
    output = run(input, running_mean, running_var, m.value(weight), m.value(bias))
    return _affine(m, input, weight, bias, output, lambda x: run(x, running_mean, running_var), _per_channel(m, output))


# ── recurrences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def recurrence(m: Meeting, ahead: Tensor, h: Tensor, *rest: Any) -> Any:
    """recurrent.lstm and gru: with b the gradient at W_hh h + b_hh of every step, v_i = Σ_t b_it h_i,t−1ᵀ."""
    (*cell, weight, bias) = rest
    source, n = m.source(weight), m.samples
    if m.out.dim != 1 or m.out.factor != 1 or any(m.source(t) is not None for t in (ahead, h, *cell)):
        return by_vmap(m)
    tap = ahead.new_zeros(()).expand_as(ahead).requires_grad_()
    result: Any
    if cell:
        result = recurrent.lstm_tapped(ahead, h, cell[0], m.value(weight), m.value(bias), tap)
        states = result[0].detach()
    else:
        result = recurrent.gru_tapped(ahead, h, m.value(weight), m.value(bias), tap)
        states = result.detach()
    start = h.detach()[None].expand(1, n, -1)

    def weights(b: Tensor) -> Outer:
        a = torch.cat([start, states[:-1]]).transpose(0, 1)[:, None]
        return Outer(a, b.transpose(0, 1)[:, None], weight.shape)

    if source is not None:
        m.tape.leaf(tap, source, lambda b: _or_written(weights(b), source))
        m.tape.site([source], m.call.label, planner.choose(len(ahead), h.shape[-1], ahead.shape[-1]))
    offset = m.source(bias)
    if offset is not None:
        m.tape.leaf(tap, offset, lambda b: Dense(wide(b).sum(0)))
    return result


def _or_written(record: Outer, source: Source) -> Record:
    return Dense(record.dense()) if record.form.name == "written" or source.name is None else record


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
    return result


def _spread(m: Meeting, argument: Tensor, *, dimensions: int) -> Tensor:
    """A parameter, broadcast to so many dimensions, with a leaf for each sample; other tensors as they are."""
    source, out, n = m.source(argument), m.out, m.samples
    if source is None:
        return argument
    value = argument.detach()
    value = value.reshape((1,) * (dimensions - value.dim()) + tuple(value.shape)).unsqueeze(out.dim)
    sizes = list(value.shape)
    sizes[out.dim] = n  # [..., sample, 1, ...]: one copy for each sample, no memory
    leaf = value.expand(sizes).detach().requires_grad_()
    own = tuple(argument.shape)
    m.tape.leaf(leaf, source, lambda g: Dense(wide(g.movedim(out.dim, 0).reshape(n, *own))))
    sizes[out.dim + 1] = out.factor
    return leaf.expand(sizes).flatten(out.dim, out.dim + 1)


def biased_attention(
    m: Meeting, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """F.scaled_dot_product_attention with a trained bias [head, query, key] as its mask."""
    if attn_mask is None or any(m.source(t) is not None for t in (query, key, value)):
        return by_vmap(m)
    m.tape.site(_found(m), m.call.label, None)
    bias = _spread(m, attn_mask, dimensions=query.dim())
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
    return m.tape.leaf(made.detach().requires_grad_(), part, record)


def by_vmap(m: Meeting) -> Any:
    """Any other operation: run once per sample, as on a batch of one, with the sample's own copy of the parameter."""
    n = m.samples
    found, flat, dims = _found(m), list[Tensor](), list[int | None]()

    def take(argument: Tensor) -> int:
        source, rows = m.source(argument), m.rows(argument)
        if source is not None:
            leaf = argument.detach().expand(n, *argument.shape).detach().requires_grad_()
            m.tape.leaf(leaf, source, lambda g: Dense(wide(g)))
            flat.append(leaf)
            dims.append(0)
        elif rows is not None:
            # [..., sample, factor, ...]: mapped over the first, the operation sees a batch of one
            flat.append(argument.unflatten(rows.dim, (n, rows.factor)))
            dims.append(rows.dim)
        else:
            flat.append(argument)
            dims.append(None)
        return len(flat) - 1

    places = mapped((m.args, m.kwargs), lambda t: _Place(take(t)))

    def single(*values: Tensor) -> Any:
        args, kwargs = _filled(places, values)
        return m.call.function(*args, **kwargs)

    names = ", ".join(sorted({name for s in found for name in s.names}))
    try:
        result = torch.vmap(single, in_dims=tuple(dims), randomness="different")(*flat)
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
        return value.movedim(0, rows.dim).flatten(rows.dim, rows.dim + 1)

    return mapped(result, joined)


class _Place(int):
    """The index of a tensor that was taken out of an argument tree."""


def _filled(tree: Any, values: Sequence[Tensor]) -> Any:
    if isinstance(tree, _Place):
        return values[tree]
    if isinstance(tree, (list, tuple)):
        return type(tree)(_filled(part, values) for part in tree)
    if isinstance(tree, dict):
        return {key: _filled(value, values) for key, value in tree.items()}
    return tree


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
