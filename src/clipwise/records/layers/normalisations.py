"""Normalisations: the affine parameters' gradients are dense and fall out of the backward.

Receives: a Meeting and the arguments of the call.
Gives: the output, tapped so that a scale's or shift's record is one row for each sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records.kinds import Dense, wide
from clipwise.records.layers.meeting import Meeting, added_to, normal_format
from clipwise.records.tape import Want, by_sample
from clipwise.types import Refused


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
    scale = added_to(source, output, m.out, keep)
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
    return m.tap(output, [input], [scale, added_to(m.source(bias), output, m.out, keep)])


def _features(
    m: Meeting,
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    run: Callable[..., Tensor],
) -> Tensor:
    """A normalisation whose parameters are of the last dimensions' shape."""
    n, out = m.samples, m.out
    keep = lambda t: wide(by_sample(t, out, n)).reshape(n, -1, *shape).sum(1)
    return _affine(m, input, weight, bias, run, keep)


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
    run = lambda x, w, b: F.layer_norm(x, normalized_shape, w, b, eps)
    return _features(m, m.cast(input, normal_format(input)), normalized_shape, weight, bias, run)


def rms_norm(
    m: Meeting,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm."""
    # the default epsilon is the input format's, which the backward's wider copy must not change
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    run = lambda x, w, _: F.rms_norm(x, normalized_shape, w, eps)
    return _features(m, input, normalized_shape, weight, None, run)


def _channels(
    m: Meeting, input: Tensor, weight: Tensor | None, bias: Tensor | None, run: Callable[..., Tensor]
) -> Tensor:
    """A normalisation whose parameters belong to channels."""
    n, factor, channels = m.samples, m.out.factor, input.shape[1]
    keep = lambda t: wide(t).reshape(n, factor, channels, -1).sum((1, 3))
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
    wide_input = m.cast(input, normal_format(input))
    return _channels(m, wide_input, weight, bias, lambda x, w, b: F.group_norm(x, num_groups, w, b, eps))


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


def torch_batch_norm(
    m: Meeting,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """The same under torch.batch_norm's names."""
    return batch_norm(m, input, running_mean, running_var, weight, bias, training, momentum, eps)
