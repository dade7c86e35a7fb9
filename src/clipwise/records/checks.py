"""Before training: what makes per-sample gradients meaningless or unsafe is found and refused.

Receives: a model, a loss and a few samples.
Gives: nothing, or an error that names the module and the fix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from clipwise.records.agreement import agree, in_half, joint, most_apart, tolerances
from clipwise.records.capture import Capture, Loss, batch_size, check_losses, trainable
from clipwise.records.chance import RowDraws, reseeds, seeded, still, watched
from clipwise.records.gradients import SampleGradients, from_dense
from clipwise.records.states import TABLE, Buffers, held, restored, same_numbers, unmoved
from clipwise.records.tf32 import forbidden, without_cudnn
from clipwise.records.trees import mapped, row, tensors
from clipwise.types import Batch, InputError, Refused

SEEDS = 32  # with which a model that draws at random is looked at: mixing once in ten passes shows in 97 of 100 tests
AGAIN = 16  # passes after which a loss that drifts is seen
ALONE = (
    "clipwise gave the loss and the model one sample, as a step may draw it alone: write .squeeze(1) for .squeeze(), "
    "which takes the samples' dimension away too, and let nothing need two samples, as a BatchNorm in training does"
)
MODEL_MIXES = (
    "the model may use the batch size or mix samples, in its backward pass too (a hook, an autograd function), draw "
    "with NumPy (write torch.randn, whose draws are told apart by rows), or the loss may hold a gradient of its own, "
    "whose second derivatives are not followed (in the place of create_graph=True write differences, "
    "(model(x + h) - model(x)) / h); check with clipwise.oracle.per_sample"
)
OWN_SEED = (
    "leave the seed to the run, whose steps seed them in secret, or draw what is to stay the same from a generator "
    "of its own, random.Random(number) or torch.Generator().manual_seed(number)"
)
READING_MIXES = (
    "whatever reads the samples (collate, a data set's rows) or takes their gradients (the method's probe) may mix "
    "them, or collate pads and the model does not mask; make a sample's row and gradient of that sample alone"
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


def check_samples(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Check on a few samples that they do not touch each other, and that norms and sums are those of each alone.

    Guarantees: the model is left as it was, its random generators included. Edge cases: products are in float32 while
    it looks, not in TF32; where the model itself computes in half precision the two ways agree only so far.
    """
    refuse_modules(model)
    with forbidden(), restored(model):
        _check_samples(model, loss, batch)


def _check_samples(model: nn.Module, loss: Loss, batch: Batch) -> None:
    if batch_size(batch) == 1:
        batch = mapped(batch, lambda t: torch.cat([t, t]) if t.dim() else t)
    _repeatable(model, loss, batch)
    with unmoved(model):
        if reseeds(lambda: loss(model, batch)):
            raise Refused(
                "the loss or the model seeds a generator (torch.manual_seed, random.seed), so that all that is drawn "
                "in a step, dropout's masks too, can be foreseen, and one sample more moves what is drawn for every "
                f"row behind it; {OWN_SEED}"
            )
    if not bool(seeded_losses(model, loss, batch).isfinite().any()):
        raise InputError(
            f"no loss of {batch_size(batch)} samples is a finite number, so that steps would add noise alone: look at "
            "the data, the loss and the model's outputs"
        )
    with unmoved(model):
        gradients = Capture(model, loss)(batch)
        if gradients.unused:
            _refuse_unused(model, loss, batch, gradients.unused)
        _independent(model, loss, batch)
    _unremembered(model, loss, batch)
    _refuse_moving(model, loss, batch)
    with unmoved(model), still(model):
        chance = RowDraws(batch_size(batch), draws(model, loss, batch))
        if chance.needed:  # otherwise as it is trained
            model.eval()
        capture = Capture(model, loss)

        def together() -> SampleGradients:
            with unmoved(model), chance.of(range(chance.rows)):
                return capture(batch)

        fast, slow = together(), _one_by_one(model, loss, batch, chance)
        for_norms, for_sums = tolerances(model, fast, together)
        agree("norms", fast.norms(), slow.norms(), for_norms, MODEL_MIXES)
        weights = torch.linspace(0.5, 1.5, fast.samples, device=fast.norms().device)
        agree("sums", joint(fast, weights), joint(slow, weights), for_sums, MODEL_MIXES)


def _refuse_unused(model: nn.Module, loss: Loss, batch: Batch, unused: Sequence[str]) -> None:
    """Say why these parameters receive no gradient; autograd alone may know of one."""
    parameters = trainable(model)
    with unmoved(model), torch.enable_grad():
        losses = loss(model, batch)
    if not losses.requires_grad:
        raise InputError("the loss has no gradient at all: leave out detach(), no_grad() or .data on its way")
    found = torch.autograd.grad(losses.sum(), [parameters[name] for name in unused], allow_unused=True)
    hidden = [name for name, gradient in zip(unused, found, strict=True) if gradient is not None]
    if hidden:
        raise InputError(
            f"the gradients of {', '.join(hidden)} cannot be followed: an autograd function of your own uses them, or "
            "code outside torch's functions; write it with torch operations, or freeze them by requires_grad_(False)"
        )
    raise InputError(
        f"these parameters receive no gradient and would never be trained: {', '.join(unused)}; use them in the loss, "
        "or write requires_grad_(False) on them"
    )


def draws(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """Whether a pass draws at random, dropout aside: then a batch and its samples one by one are different draws."""
    with unmoved(model), still(model):
        return watched(lambda: loss(model, batch))[1]


def _one_by_one(model: nn.Module, loss: Loss, batch: Batch, chance: RowDraws) -> SampleGradients:
    """The gradients of batches of one sample each, by autograd alone: nothing of what they are compared with.

    Without cuDNN, whose recurrent layers have a gradient only in training mode.
    """
    parameters, found = trainable(model), list[list[Tensor]]()
    for i in range(batch_size(batch)):
        with unmoved(model), without_cudnn(), torch.enable_grad(), chance.of([i]):
            try:
                losses = loss(model, row(batch, i))
            except Exception as error:
                error.add_note(ALONE)
                raise
            check_losses(losses, 1)
            own = torch.autograd.grad(losses[0], list(parameters.values()), allow_unused=True)
        pairs = zip(own, parameters.values(), strict=True)
        found.append([torch.zeros_like(p) if g is None else g.to_dense() for g, p in pairs])
    each = (torch.stack(rows) for rows in zip(*found, strict=True))
    return from_dense(dict(zip(parameters, each, strict=True)), parameters)


def alone_as_together(
    model: nn.Module,
    gradients: Callable[[Tensor], SampleGradients],
    samples: int,
    terms: Callable[[SampleGradients], Mapping[str, Tensor]],
) -> None:
    """Refuse a method or data in which a sample's gradient depends on who else was read with it.

    ``gradients(places)`` of all of so many samples together must be those of each alone, and so must be ``terms``, what
    they add to a step, by the name of a block and over its bound. The model is left as it was.
    Edge cases: dropout is held still, since its draws follow a row's place; a model that draws in another way is in
    eval mode.
    """
    chance = RowDraws(samples, False)

    def own(places: Tensor) -> tuple[SampleGradients, bool]:
        # each from the same buffers: a spectral norm moves its own
        with unmoved(model), chance.of(places.tolist()):
            return watched(lambda: gradients(places))

    with restored(model), still(model), forbidden():
        places = torch.arange(samples, device="cpu")
        together, drew = own(places)
        if drew:
            model.eval()
            chance.needed = True
            together, _ = own(places)
        each = [own(place)[0] for place in places.split(1)]
        weights = torch.linspace(0.5, 1.5, samples, device=together.norms().device)
        for_norms, for_sums = tolerances(model, together, lambda: own(places)[0])
        agree("norms", together.norms(), torch.cat([g.norms() for g in each]), for_norms, READING_MIXES)
        parts = [joint(g, weight) for g, weight in zip(each, weights.split(1), strict=True)]
        agree("sums", joint(together, weights), torch.stack(parts).sum(0), for_sums, READING_MIXES)
        most, own_terms = most_apart(in_half(model, together)), [terms(g) for g in each]
        for name, term in terms(together).items():
            apart = float(torch.linalg.vector_norm(term - torch.stack([t[name] for t in own_terms]).sum(0)))
            if apart > most * math.sqrt(samples):
                raise Refused(
                    f"what {name} adds to a step follows who else is in it: for {samples} samples it moves by "
                    f"{apart:.2g} bounds, expected at most {most * math.sqrt(samples):.2g}; if nothing is "
                    "left of its gradient but rounding, which the method makes as long as any, freeze it by "
                    "requires_grad_(False), or weigh it by flat or automatic"
                )


def _repeatable(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Refuse what gives one batch other losses the second time: nothing else could be compared."""
    rows = mapped(batch, torch.clone)
    found = [seeded_losses(model, loss, rows) for _ in range(2)]
    if same_losses(*found):
        if same_numbers(*found):
            return
        # Rounding that differs from pass to pass goes back and forth; what slowly follows the batches goes on.
        found += [seeded_losses(model, loss, rows) for _ in range(AGAIN)]
        once = torch.stack([(b - a).abs() for a, b in itertools.pairwise(found)]).amax(0)
        if not bool(((found[-1] - found[0]).abs() > AGAIN / 4 * once).any()):
            return
    if not all(map(torch.equal, tensors(rows), tensors(batch))):
        raise Refused(
            "the loss or the model writes into its batch, so that a second pass sees another one: work on a copy, such "
            "as x = 2 * x for x.mul_(2)"
        )
    raise Refused(
        "the loss or the model gives the same batch other losses the second time, with every generator at the same "
        "seed: it keeps something of the batches that it saw, counts its passes or draws from a generator of its own; "
        "keep nothing, move a schedule in the loop, behind private.step(batch), and draw without generator=…"
    )


def refuse_kept_from_first(model: nn.Module, fresh: nn.Module | None, loss: Loss, batch: Batch, others: Batch) -> None:
    """Refuse what keeps something of the first batches it sees, wherever: after others, losses differ.

    ``model`` and ``loss`` have seen ``batch`` and nothing else: what only grows (a largest value) moves at first alone.
    ``fresh`` is the model's twin from before that, if it can have one: with others first, what is kept for good is of
    those. Edge cases: what gives other losses whenever it is asked is left to the self-test.
    """

    def losses(model: nn.Module, first: Batch) -> Tensor:
        with restored(model), torch.enable_grad():
            for some in (first, batch):
                seeded(0)
                found = losses_of(model, loss, mapped(some, torch.clone)).detach()  # it may write into its batch
            return found

    own, again = losses(model, batch), losses(model, batch)
    if not same_losses(own, again):
        return
    if not same_losses(own, losses(model, others)):
        raise Refused(
            "the loss or the model gives the same batch other losses the second time, once it has seen others: it "
            "keeps something of the batches that it saw (a largest value, classes that it has met); keep nothing, or "
            "compute it from public data before the run"
        )
    try:
        after_others = own if fresh is None else losses(fresh, others)
    except Exception:  # a copy of what its hooks or attributes hold need not work as that does
        return
    if not same_losses(own, after_others):
        raise Refused(
            "the model gives samples other losses after it saw other samples first: it keeps something of its first "
            "batch (a mean, a range, weights that fit it) without noise, and every later step uses it; compute it from "
            "public data and give it to the model before the run, or leave it out"
        )


def _independent(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Give the last sample other values, then the first: no other sample's loss may move, neither now nor later."""
    last, first = _changed(batch, -1), _changed(batch, 0)
    chance = RowDraws(batch_size(batch), draws(model, loss, batch))
    # the batch itself once more at the end: what a module kept of the others elsewhere than in buffers shows then
    for seed in range(SEEDS if chance.needed else 1):
        with chance.of(range(chance.rows)):
            before, *after = (seeded_losses(model, loss, b, seed) for b in (batch, last, first, batch))
        kinds = zip((last, first, last), after, (slice(-1), slice(1, None), slice(None)), strict=True)
        for changed, losses, same in kinds:
            if not same_losses(before[same], losses[same]):
                name = culprit(model, loss, (batch, same), (changed, same), seed)
                write = "replace it by a module that treats samples one by one (nn.GroupNorm, nn.LayerNorm)"
                if name.startswith(BEFORE):
                    write = "leave it out there (mixup, cutmix, a mean of the batch), or mix each with public samples"
                if name == "the loss":
                    write = (
                        "let it use no mean, count, rank or largest value of the batch, and where there is none look "
                        "at shapes: [n, 1] and [n] make [n, n]; write .squeeze(1), or .flatten(1).mean(1)"
                    )
                raise Refused(
                    f"{name} mixes the samples of a batch: changing one sample changed another's loss; {write}"
                )


def _unremembered(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Buffers and parameters after different batches: what differs holds private data without noise."""
    fewer = mapped(batch, lambda t: t[:-1] if t.dim() else t)
    after: list[dict[str, Tensor]] = []
    for data in (batch, _changed(batch, -1), _changed(batch, 0), fewer):
        with restored(model), torch.enable_grad():
            seeded(0)
            loss(model, data)
            after.append(held(model))
    for other in after[1 : 3 if draws(model, loss, batch) else None]:  # fewer rows are other draws
        refuse_remembered(model, after[0], other)


def refuse_remembered(model: nn.Module, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Refuse buffers, parameters and extra states that are not the same after two batches."""
    for name in _differing(one, other):
        raise Refused(
            f"the {_kind(model, name)} {name} is computed from the batch, its values or its size, so it would keep "
            "private data without noise; compute it from public data beforehand, or call .eval() on its module"
        )


def _refuse_moving(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Refuse what moves in every pass, whatever the batch, and that a step does not put back before each chunk.

    A teacher's weights that follow the model's, for one; at the start the two may be the same.
    """
    free = Buffers(model).kept | set(trainable(model))
    after: list[dict[str, Tensor]] = []
    with restored(model), torch.enable_grad():
        with torch.no_grad():
            for p in trainable(model).values():
                p.mul_(1.25)
        for _ in range(2):  # what is copied from the weights, or put into a range, stays in the second
            seeded(0)
            loss(model, mapped(batch, torch.clone))
            after.append(held(model))
    for name in set(_differing(*after)) - free:
        raise Refused(
            f"the {_kind(model, name)} {name} moves in every forward pass: it would tell in how many chunks a step was "
            "computed, and so how many samples were drawn; move it between steps, behind private.step(batch), or keep "
            f"it in a buffer of fractions, of at most {TABLE} entries, which every chunk finds as it was"
        )


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> Iterator[str]:
    for name, value in one.items():
        if name not in other or not same_numbers(value.to_dense(), other[name].to_dense()):  # sparse ones know no equal
            yield name


def _kind(model: nn.Module, name: str) -> str:
    known = (("buffer", model.named_buffers()), ("parameter", model.named_parameters()))
    return next((kind for kind, values in known if name in dict(values)), "state")


def _changed(batch: Batch, place: int) -> Batch:
    """The batch with other values for one sample: one more than they are, where all samples are alike."""

    def changed(by: Callable[[Tensor], Tensor]) -> Batch:
        return mapped(batch, lambda rows: changed_at(rows, place, by))

    other = changed(exchanged)
    alike = all(map(torch.equal, tensors(batch), tensors(other)))
    return changed(lambda rows: rows + 1 if rows.is_floating_point() else rows) if alike else other


def changed_at(rows: Tensor, index: Any, by: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows, those of the index changed ``by`` a function of all; what has no rows stays as it is."""
    if not rows.dim():
        return rows
    changed = rows.clone()
    changed[index] = by(rows)[index]
    return changed


def exchanged(rows: Tensor) -> Tensor:
    """Other values for every row, none beyond those at its places: others may be no probability, or no index.

    On CUDA a kernel that asserts what it is given would end the process.
    """
    if not rows.is_floating_point():
        return rows.roll(1, 0)
    low, high = rows.amin(0), rows.amax(0)
    return (low + high - rows).clamp(low, high)  # rounding may lead beyond them


@contextmanager
def _no_backward() -> Iterator[None]:
    backward = torch.autograd.backward

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused(
            "the loss or the model calls backward(), which leaves gradients without noise on whatever it trains; give "
            "the losses alone: private.step computes their gradients, and another model is trained in a run of its "
            "own, or on public data"
        )

    torch.autograd.backward = refuse  # which Tensor.backward calls too
    try:
        yield
    finally:
        torch.autograd.backward = backward


def losses_of(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    """One value per sample, or an error; a loss that trains something itself is refused."""
    with _no_backward():
        values = loss(model, batch)
    check_losses(values, batch_size(batch))
    return values


def seeded_losses(model: nn.Module, loss: Loss, batch: Batch, seed: int = 0) -> Tensor:
    """The same with every generator at this seed, as in training; the model is left as it was."""
    with unmoved(model), torch.enable_grad():
        seeded(seed)
        return losses_of(model, loss, batch).detach()


def same_losses(one: Tensor, other: Tensor) -> bool:
    """Whether two passes over the same rows gave the same losses, but for rounding."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


BEFORE = "what is computed before"
Some = tuple[Batch, Any]  # rows, and the index of those to look at


def culprit(model: nn.Module, loss: Loss, one: Some, other: Some, seed: int = 0, tolerance: float = 1e-4) -> str:
    """The first module, innermost first, whose output for the samples that two batches share differs."""
    seen: list[list[tuple[str, Tensor]]] = [[], []]

    def watch(name: str, rows: int, index: Any, into: list[tuple[str, Tensor]]) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            place = f"{name or 'the model'} ({type(module).__name__})"
            for who, given in ((f"{BEFORE} {place}", inputs), (place, output)):
                into.extend(
                    (who, t.detach()[index])
                    for t in tensors(given)
                    if t.dim() and t.shape[0] == rows and t.is_floating_point()
                )

        return hook

    for into, (rows, index) in zip(seen, (one, other), strict=True):
        size = batch_size(rows)
        handles = [m.register_forward_hook(watch(name, size, index, into)) for name, m in model.named_modules()]
        try:
            seeded_losses(model, loss, rows, seed)
        finally:
            for handle in handles:
                handle.remove()
    for (name, first), (_, second) in zip(*seen, strict=False):
        if first.shape != second.shape:
            return "the loss or the model"
        least = tolerance * float(first.detach().abs().nan_to_num(0.0, 0.0, 0.0).mean()) / 100 + 1e-6
        if not torch.allclose(first, second, rtol=tolerance, atol=least, equal_nan=True):
            return name
    return "the loss"
