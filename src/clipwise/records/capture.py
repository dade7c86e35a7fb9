"""One forward and one backward → (a, b) of every layer, without computing a weight gradient.

Receives: a model, a loss that gives one value per sample, and a batch.
Gives: the losses and SampleGradients; or the same as one traced graph, for ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.records.chance import kept
from clipwise.records.displacement import Own
from clipwise.records.follow import Compare, PathChanged, Plan, Recorder, Scout
from clipwise.records.gradients import SampleGradients
from clipwise.records.kinds import joined
from clipwise.records.tf32 import without_cudnn_if_recurrent
from clipwise.records.trees import picked, row, tensors
from clipwise.types import Batch, InputError, Refused

Loss = Callable[[nn.Module, Batch], Tensor]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; a tied one appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def device_of(model: nn.Module) -> torch.device:
    """Where the model is: all of it on one device."""
    return next(model.parameters()).device


@dataclass
class Capture:
    """Per-sample gradients of one model and loss; it remembers the plan of each batch shape that it has seen."""

    model: nn.Module
    loss: Loss
    plans: dict[Any, Plan] = field(default_factory=dict)

    def __call__(self, batch: Batch, owns: Mapping[str, Own] | None = None, dual: bool = False) -> SampleGradients:
        """The per-sample gradients of a batch; with ``owns``, at each unit's own parameters (see ``ascent``)."""
        parameters = trainable(self.model)
        samples = batch_size(batch)
        if not parameters:
            raise InputError("the model has no trainable parameter; write requires_grad_(True) on what is to train")
        if samples == 0:
            return SampleGradients({}, parameters, 0, torch.zeros(0))
        plan = self.plan(batch, parameters)
        drawn = torch.get_rng_state()
        try:
            return recorded(self.model, self.loss, batch, plan, parameters, owns=owns, dual=dual)
        except PathChanged:
            # the path depends on values (a mask that is skipped where nothing is masked): scout with all of them
            torch.set_rng_state(drawn)
            plan = self.plans[self._key(batch, parameters)] = scouted(
                self.model, self.loss, batch, parameters, whole=True
            )
            return recorded(self.model, self.loss, batch, plan, parameters, owns=owns, dual=dual)

    def plan(self, batch: Batch, parameters: Mapping[str, Tensor]) -> Plan:
        """Where the model's calls hold samples, for batches of this shape."""
        key = self._key(batch, parameters)
        if key not in self.plans:
            try:
                self.plans[key] = scouted(self.model, self.loss, batch, parameters)
            except PathChanged:
                self.plans[key] = scouted(self.model, self.loss, batch, parameters, whole=True)
        return self.plans[key]

    def _key(self, batch: Batch, parameters: Mapping[str, Tensor]) -> Any:
        return (
            tuple((t.shape[1:], t.dtype) for t in tensors(batch)),
            tuple(module.training for module in self.model.modules()),
            tuple(parameters),
            torch.is_autocast_enabled(),
        )


def per_sample(model: nn.Module, loss: Loss, batch: Batch) -> SampleGradients:
    """The gradient of each sample's loss, for ``loss(model, batch)`` that gives one value per sample.

    Guarantees: one forward and one backward pass; the model is not changed and nothing is left on it.
    Edge cases: an empty batch; a parameter that takes no part (``.unused``); an operation without a fast path
    (``.fallbacks``).
    """
    return Capture(model, loss)(batch)


def recorded(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    plan: Plan,
    parameters: Mapping[str, Tensor],
    only: int | None = None,
    owns: Mapping[str, Own] | None = None,
    dual: bool = False,
) -> SampleGradients:
    """One forward and one backward pass by the plan; ``only`` takes the gradient of that sample's loss alone.

    ``owns``: what each unit has in the parameters' places; ``dual``: with forward-mode derivatives.
    """
    samples = batch_size(batch)
    with torch.enable_grad():
        with Recorder(parameters, plan, samples, owns, dual) as recorder:
            losses = loss(model, batch)
        check_losses(losses, samples)
        records = recorder.tape.finish(losses if only is None else losses[only : only + 1], parameters)
    joint = {name: joined(records[name]) for name in parameters if name in records}
    return SampleGradients(joint, parameters, samples, losses.detach(), tuple(recorder.tape.sites))


def scouted(
    model: nn.Module, loss: Loss, batch: Batch, parameters: Mapping[str, Tensor], *, whole: bool = False
) -> Plan:
    """The plan for batches of this shape, checked on a few samples: the loss of one has no part in the others.

    Sizes are compared between copies of one sample, since what depends on values (trimming, say) is then the same;
    with ``whole``, between the batch and twice the batch.
    """
    once = batch_size(batch)
    few, more = (once, 2 * once) if whole else (2, 3)
    shown = batch if whole else row(batch, 0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with _drawing_alike(batch), torch.enable_grad(), Scout(parameters) as scout:
            check_losses(loss(model, repeated(shown, few)), few)
        with _drawing_alike(batch), torch.enable_grad():
            with Compare(parameters, scout.log, few, more) as compare:
                check_losses(loss(model, repeated(shown, more)), more)
            plan = compare.plan()
        _check_plan(model, loss, batch if whole else repeated(batch, min(once, 3)), plan, parameters)
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():  # a spectral norm's power iteration, for one
                buffer.copy_(before[name])
    return plan


def _drawing_alike(batch: Batch) -> AbstractContextManager[None]:
    """For passes one after another: what is drawn for all samples at once may decide which way the model goes."""
    return kept({t.device for t in tensors(batch) if t.is_cuda})


def _check_plan(model: nn.Module, loss: Loss, batch: Batch, plan: Plan, parameters: Mapping[str, Tensor]) -> None:
    last = batch_size(batch) - 1
    for sample in sorted({0, last // 2, last}):
        with _drawing_alike(batch):
            gradients = recorded(model, loss, batch, plan, parameters, only=sample)
        norms = gradients.norms()
        place = torch.arange(last + 1, device=norms.device)
        if not bool((norms > 1e-6 * norms[sample])[place != sample].any()):
            continue
        # A norm of zero may come out a little larger, and this sample's own be no more than that: the others' gradients
        # themselves, added with weights in which nothing cancels.
        elsewhere = gradients.masked(place != sample).weighted_sum((2.0 + place).sqrt())
        if not any(bool(torch.linalg.vector_norm(value) > 1e-6 * norms[sample]) for value in elsewhere.values()):
            continue
        raise Refused(
            "the model or the loss mixes the samples of a batch, or puts their entries in another order: one sample's "
            "loss has a gradient at another sample; treat samples one by one (nn.GroupNorm instead of nn.BatchNorm) "
            "and keep a sample's entries together; attention and recurrent layers may need batch_first=True"
        )


def repeated(batch: Batch, count: int) -> Batch:
    """So many rows, the given ones again and again."""
    size = batch_size(batch)
    if size == 0:
        raise InputError("expected at least one row to repeat, got none")
    return picked(batch, torch.arange(count, device="cpu") % size)


def batch_size(batch: Batch) -> int:
    """The number of rows that all tensors of a batch share."""
    sizes = {t.shape[0] for t in tensors(batch) if t.dim()}
    if len(sizes) != 1:
        raise InputError(
            f"expected a batch whose tensors all have one row per sample, got {sorted(sizes) or 'no tensor'} rows"
        )
    return int(sizes.pop())


def check_losses(losses: Any, samples: int) -> None:
    """Refuse a loss that is not one value per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        write = "torch.nn.functional.cross_entropy(model(x), y, reduction='none')"
        if isinstance(losses, Tensor) and losses.dim() > 1 and len(losses) == samples:
            write = "values.flatten(1).mean(1), each sample's own mean"
            if losses.shape == (samples, samples) != (1, 1):  # which no mean would mend
                write = f"model(x).squeeze(1) where [{samples}, 1] met [{samples}], otherwise {write}"
        raise InputError(
            f"the loss must give one value per sample: for {samples} samples expected shape [{samples}], got {got}; "
            f"write {write}; in the place of a model's own average, such as Hugging Face's .loss, use its logits"
        )


def traced(
    model: nn.Module, loss: Loss, batch: Batch, then: Callable[[SampleGradients], Any]
) -> Callable[[dict[str, Tensor], Batch], Any]:
    """``then`` of the per-sample gradients, as one graph of parameters and batch."""
    capture = Capture(model, loss)
    capture.plan(batch, trainable(model))
    return traced_call(model, lambda batch: then(capture(batch)), batch)


def traced_call(model: nn.Module, function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """What a function makes of captured gradients, as one graph: a pure function of parameters and arguments.

    Forward, backward, and whatever is made of the records (norms, weights, sums) become one graph without side effects,
    so ``torch.compile(..., fullgraph=True)`` sees all of it. The graph is for arguments of these shapes, whose plans
    the capture must know.
    """

    def pure(parameters: dict[str, Tensor], *arguments: Any) -> Any:
        own = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        # Without cuDNN a recurrent layer does not ask for its weights' addresses, which fake tensors do not have. But
        # a convolution without it is traced as if it wrote its channels first, whatever it was given.
        with swapped(model, own), without_cudnn_if_recurrent(model):
            return function(*arguments)

    return graph_of(pure, {name: p.detach() for name, p in trainable(model).items()}, *example)


@contextmanager
def swapped(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these tensors in its parameters' places: what ``functional_call`` does, around any code."""
    with torch.nn.utils.stateless._reparametrize_module(model, dict(parameters), tie_weights=True):
        yield


def graph_of(
    function: Callable[..., Any], *example: Any, decompositions: Mapping[Any, Any] | None = None
) -> Callable[..., Any]:
    """A function of tensors as one graph of tensor operations, some of them taken apart."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # fake tensors: a model that asks for values while it is traced (a mask's shortcut, say) then knows not to
    trace = make_fx(function, decompositions, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph: Callable[..., Any] = trace(*example)
    return graph
