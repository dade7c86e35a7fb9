"""Before training: what makes per-sample gradients meaningless or unsafe is found and refused.

Receives: a model, a loss and a few samples.
Gives: nothing, or an error that names the module and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from clipwise.records import oracle
from clipwise.records.capture import Capture, Loss, batch_size, trainable
from clipwise.records.gradients import SampleGradients
from clipwise.records.kernels.gram import HALF
from clipwise.records.tape import mapped, tensors
from clipwise.records.tf32 import forbidden
from clipwise.types import Batch, InputError, Refused

AGREES, HALF_AGREES = 1e-3, 5e-2  # how far norms and sums may be from the oracle's, of their size
AT_MOST, HALF_AT_MOST = 5e-2, 0.3  # the same where the network itself blows rounding up
ROUNDING, HALF_ROUNDING = 1e-5, 2.0**-9  # of each weight: what fast float32 convolutions lose, and what bfloat16 does
MODEL_MIXES = "the model may use the batch size or mix samples; check with clipwise.oracle.per_sample"
READING_MIXES = (
    "whatever reads the samples (collate, a data set's rows) or takes their gradients (the method's probe) may mix "
    "them; make a sample's row and gradient of that sample alone"
)


def refuse_modules(model: nn.Module) -> None:
    """Refuse modules that mix samples or keep un-noised statistics of them."""
    for name, module in model.named_modules():
        place = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, _InstanceNorm):
            if module.training and module.track_running_stats:
                raise Refused(
                    f"{place} keeps running statistics of private data without noise; write track_running_stats=False"
                )
        elif isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise Refused(
                f"{place} normalises with the batch's own statistics, so it mixes samples; write "
                f"nn.GroupNorm(num_groups, {module.num_features}) instead, or call .eval() on it to keep its "
                "statistics fixed"
            )


def self_test(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Check on a few samples that samples do not touch each other, and that norms and sums are the oracle's.

    Guarantees: the model is left as it was, its random generators included. Edge cases: products are in float32 while
    it looks, not in TF32; where the model itself computes in half precision the two ways agree only so far.
    """
    refuse_modules(model)
    with forbidden():
        _self_test(model, loss, batch)


def _self_test(model: nn.Module, loss: Loss, batch: Batch) -> None:
    if batch_size(batch) == 1:
        batch = mapped(batch, lambda t: torch.cat([t, t]) if t.dim() else t)
    with restored(model):
        gradients = Capture(model, loss)(batch)
        if gradients.unused:
            raise InputError(
                f"these parameters receive no gradient and would never be trained: {', '.join(gradients.unused)}; "
                "use them in the loss, or write requires_grad_(False) on them"
            )
        _independent(model, loss, batch)
    _unremembered(model, loss, batch)
    with restored(model):
        model.eval()  # with dropout a batch and its samples one by one are different draws
        capture = Capture(model, loss)
        fast, slow = capture(batch), oracle.per_sample(model, loss, batch)
        for_norms, for_sums = _tolerances(model, fast, lambda: capture(batch))
        _agree("norms", fast.norms(), slow.norms(), for_norms, MODEL_MIXES)
        weights = torch.linspace(0.5, 1.5, fast.samples, device=fast.norms().device)
        _agree("sums", _joint(fast, weights), _joint(slow, weights), for_sums, MODEL_MIXES)


def alone_as_together(model: nn.Module, gradients: Callable[[Tensor], SampleGradients], samples: int) -> None:
    """Refuse a method or data in which a sample's gradient depends on who else was read with it.

    ``gradients(places)`` of all of so many samples together must be those of each alone. The model is left as it was.
    Edge cases: dropout is off, since its draws follow a row's place.
    """
    with restored(model), forbidden():
        model.eval()
        places = torch.arange(samples)
        together, each = gradients(places), [gradients(place) for place in places.split(1)]
        weights = torch.linspace(0.5, 1.5, samples, device=together.norms().device)
        for_norms, for_sums = _tolerances(model, together, lambda: gradients(places))
        _agree("norms", together.norms(), torch.cat([g.norms() for g in each]), for_norms, READING_MIXES)
        parts = [_joint(g, weight) for g, weight in zip(each, weights.split(1), strict=True)]
        _agree("sums", _joint(together, weights), torch.stack(parts).sum(0), for_sums, READING_MIXES)


def modes(model: nn.Module) -> tuple[tuple[type, bool], ...]:
    """Which modules there are, and which are in training mode: in another mode a model may be another function."""
    return tuple((type(module), module.training) for module in model.modules())


def _joint(gradients: SampleGradients, weights: Tensor) -> Tensor:
    summed = gradients.weighted_sum(weights)
    return torch.cat([summed[name].flatten() for name in gradients.names])


def _tolerances(model: nn.Module, here: SampleGradients, again: Callable[[], SampleGradients]) -> tuple[float, float]:
    """How far apart two ways to compute the same norms may come out, and the same sums.

    Some networks blow rounding up (many of a ReLU's inputs are at its kink), so that no two ways agree closely. How
    much this one does is seen by moving its weights by as much as rounding would.
    """
    half = _in_half(here)
    least, most, rounding = (HALF_AGREES, HALF_AT_MOST, HALF_ROUNDING) if half else (AGREES, AT_MOST, ROUNDING)
    generator = torch.Generator("cpu").manual_seed(0)
    kept = {name: p.detach().clone() for name, p in trainable(model).items()}
    try:
        with torch.no_grad():
            for p in trainable(model).values():
                p.mul_(1 + rounding * torch.randn(p.shape, generator=generator, device="cpu").to(p))
        there = again()
    finally:
        with torch.no_grad():
            for name, p in trainable(model).items():
                p.copy_(kept[name])
    weights = torch.ones(here.samples, device=here.norms().device)
    moved = ((here.norms(), there.norms()), (_joint(here, weights), _joint(there, weights)))
    norms, sums = (_apart(before.double(), after.double()) for before, after in moved)
    return min(most, max(least, 2 * norms)), min(most, max(least, 2 * sums))


def _apart(before: Tensor, after: Tensor) -> float:
    """The difference's length beside the first one's; 0 where that is not a number."""
    apart = float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before).clamp(min=1e-12))
    return apart if math.isfinite(apart) else 0.0


def _agree(what: str, fast: Tensor, slow: Tensor, tolerance: float, why: str) -> None:
    finite = slow.isfinite()
    error = torch.linalg.vector_norm((fast.double() - slow.double())[finite])
    scale = torch.linalg.vector_norm(slow.double()[finite])
    if not bool(error <= tolerance * scale + 1e-12):
        raise Refused(
            f"the self-test failed: per-sample {what} differ from those computed one sample at a time by "
            f"{float(error / scale):.1e} of their size, expected at most {tolerance:.0e}; {why}"
        )


def _independent(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Give the last sample other values, then the first: no other sample's loss may move, neither now nor later."""
    last, first = mapped(batch, _last_changed), mapped(batch, _first_changed)
    # the batch itself once more at the end: what a module kept of the others elsewhere than in buffers shows then
    before, *after = (_losses(model, loss, b) for b in (batch, last, first, batch))
    for changed, losses, same in zip((last, first, last), after, (slice(-1), slice(1, None), slice(None)), strict=True):
        if not torch.allclose(before[same], losses[same], rtol=1e-4, atol=1e-6, equal_nan=True):
            raise Refused(
                f"{_culprit(model, loss, batch, changed, same)} mixes the samples of a batch: changing one sample "
                "changed another's loss; replace it by a module that treats samples one by one (nn.GroupNorm, "
                "nn.LayerNorm)"
            )


def _unremembered(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Buffers and parameters after different batches: what differs holds private data without noise."""
    kept: list[dict[str, Tensor]] = []
    for data in (batch, mapped(batch, _last_changed), mapped(batch, _first_changed)):
        with restored(model), torch.no_grad():
            torch.manual_seed(0)
            loss(model, data)
            kept.append({name: value.clone() for name, value in _held(model).items()})
    for name, value in kept[0].items():
        if not all(torch.equal(value, other[name]) for other in kept[1:]):
            kind = "buffer" if name in dict(model.named_buffers()) else "parameter"
            raise Refused(
                f"the {kind} {name} is computed from the batch, so it would keep private data without noise; "
                "compute it from public data beforehand, or call .eval() on its module"
            )


def _held(model: nn.Module) -> dict[str, Tensor]:
    """All that a forward pass could write to."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _last_changed(rows: Tensor) -> Tensor:
    return _changed(rows, -1, 0)


def _first_changed(rows: Tensor) -> Tensor:
    return _changed(rows, 0, -1)


def _changed(rows: Tensor, place: int, by: int) -> Tensor:
    """The rows with one of them replaced by another."""
    if not rows.dim():
        return rows
    other = rows.clone()
    other[place] = rows[by]
    if rows.is_floating_point():
        other[place] += 1
    return other


def _losses(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    # buffers too: a spectral norm takes one step of its iteration in every forward pass
    with restored(model), torch.no_grad():
        torch.manual_seed(0)
        return loss(model, batch).detach()


def _culprit(model: nn.Module, loss: Loss, batch: Batch, changed: Batch, same: slice) -> str:
    """The first module, innermost first, whose output for the unchanged samples moved."""
    rows = batch_size(batch)
    seen: list[list[tuple[str, Tensor]]] = [[], []]

    def watch(name: str, into: list[tuple[str, Tensor]]) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            into.extend(
                (f"{name or 'the model'} ({type(module).__name__})", t.detach())
                for t in tensors(output)
                if t.dim() and t.shape[0] == rows and t.is_floating_point()
            )

        return hook

    for into, data in zip(seen, (batch, changed), strict=True):
        handles = [m.register_forward_hook(watch(name, into)) for name, m in model.named_modules()]
        try:
            _losses(model, loss, data)
        finally:
            for handle in handles:
                handle.remove()
    for (name, first), (_, second) in zip(*seen, strict=False):
        if not torch.allclose(first[same], second[same], rtol=1e-4, atol=1e-6, equal_nan=True):
            return name
    return "the loss"


def _in_half(gradients: SampleGradients) -> bool:
    """Whether some layer was computed in half precision, by its weights or by autocast."""
    held = [vars(record) for records in gradients.records.values() for record in records]
    return any(isinstance(v, Tensor) and v.dtype in HALF for values in held for v in values.values())


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Training flags, buffers, parameters and random generators as they were."""
    flags = [(module, module.training) for module in model.modules()]
    kept = {name: value.detach().clone() for name, value in _held(model).items()}
    devices = {p.device for p in trainable(model).values() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for name, value in _held(model).items():
                value.copy_(kept[name])
