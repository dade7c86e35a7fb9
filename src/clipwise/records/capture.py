"""One forward and one backward → (a, b) of every layer, without computing a weight gradient.

Receives: a model, a loss that gives one value per sample, and a batch.
Gives: the losses and SampleGradients; or the same as one traced graph, for ``torch.compile``.

How a user's unmodified model is followed: a torch-function mode sees every call that a parameter takes part in.
A *scouting* pass over two and then three copies of one sample tells, from the sizes that change, where each tensor
holds its samples ([sample, …], [time, sample, …], [sample · time, …]); what does not change is made of parameters
alone. Nothing is hooked or patched, and nothing is left on the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipwise.records.composites import COMPOSITES
from clipwise.records.gradients import SampleGradients
from clipwise.records.kinds import joined
from clipwise.records.layers import Meeting, meet, mixing
from clipwise.records.tape import Call, Lookup, Rows, Source, Tape, mapped, tensors
from clipwise.types import Batch, InputError, Refused

Loss = Callable[[nn.Module, Batch], Tensor]
Plan = tuple[Call, ...]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; a tied one appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# Calls that only look at a tensor, or turn it: how often a model makes them is no part of its path.
_QUERIES = frozenset("__get__ size dim numel stride data_ptr is_contiguous is_floating_point element_size".split())


class _Follow(TorchFunctionMode):
    """Sees every call, knows which tensors are made of parameters alone, and takes composite functions apart."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sources = {id(p): Source(p, frozenset([name])) for name, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Make one call, noting what it does with parameters."""
        kwargs = kwargs or {}
        touches = self.touches(args, kwargs)
        if getattr(function, "__name__", "") in _QUERIES:
            return self.derive(function, args, kwargs) if touches else function(*args, **kwargs)
        if not touches:
            return self.other(function, args, kwargs)
        composite = COMPOSITES.get(function)
        if composite is not None:
            return composite(self, *args, **kwargs)
        return self.touch(function, args, kwargs)

    def touches(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether anything made of parameters is among the arguments."""
        return any(id(t) in self.sources for t in tensors(args, kwargs))

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call without parameters."""
        return function(*args, **kwargs)

    def touch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call with parameters."""
        raise AssertionError

    def derive(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call whose tensors are all made of parameters or fixed: so is its result."""
        result = function(*args, **kwargs)
        found = [self.sources[id(t)] for t in tensors(args, kwargs) if id(t) in self.sources]
        names = frozenset(name for source in found for name in source.names)
        for tensor in tensors(result):
            # without a gradient (detach, no_grad) it is a constant, as for any autograd
            if tensor.requires_grad and id(tensor) not in self.sources:
                self.sources[id(tensor)] = _derived(function, args, kwargs, tensor, names, found)
        return result


_TRANSPOSES = ("t", "transpose", "swapaxes", "__get__")  # __get__: the properties T and mT


def _derived(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, made: Tensor, names: frozenset[str], found: Any
) -> Source:
    first = found[0]
    plain = len(found) == 1 and first.tensor.is_leaf
    if plain and first.tensor.dim() == 2 and made.dim() == 2 and _is_transpose(function, made, first.tensor):
        return Source(made, names, flipped=True)
    if plain and function is F.embedding and len(args) > 1 and args[1] is first.tensor:
        padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
        return Source(made, names, lookup=Lookup(args[0], padding))
    return Source(made, names)


def _is_transpose(function: Callable[..., Any], made: Tensor, of: Tensor) -> bool:
    name = getattr(function, "__name__", "")
    return name in _TRANSPOSES and made.shape == of.shape[::-1] and made.stride() == of.stride()[::-1]


@dataclass
class _Sizes:
    """One call of a scouting pass."""

    function: Callable[..., Any]
    arguments: list[torch.Size]
    outputs: list[torch.Size]


class _Scout(_Follow):
    """First pass: writes down the sizes of every call."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.log: list[_Sizes] = []

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        before = [t.shape for t in tensors(args, kwargs)]
        result = function(*args, **kwargs)
        self.log.append(_Sizes(function, before, [t.shape for t in tensors(result)]))
        return result

    touch = other


class _Compare(_Scout):
    """Second pass, with one more sample: what changed size holds samples."""

    def __init__(self, parameters: Mapping[str, Tensor], log: Sequence[_Sizes]) -> None:
        super().__init__(parameters)
        self.first = log
        self.plan: list[Call] = []

    def touch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        index = len(self.log)
        result = super().other(function, args, kwargs)
        call = _call(self.log[index], self.first[index] if index < len(self.first) else None)
        self.plan.append(call)
        return self.derive(lambda *_, **__: result, args, kwargs) if _fixed(call) else result


def _fixed(call: Call) -> bool:
    return all(rows is None for rows in (*call.arguments, *call.outputs))


def _call(now: _Sizes, before: _Sizes | None) -> Call:
    if (
        before is None
        or before.function != now.function
        or len(before.arguments) != len(now.arguments)
        or len(before.outputs) != len(now.outputs)
    ):
        raise InputError(
            "the model takes a different path for two samples than for three; expected the same calls for every batch "
            "size; use clipwise.oracle.per_sample for such a model"
        )
    label = getattr(now.function, "__name__", str(now.function))
    return Call(
        now.function,
        tuple(_rows(a, b, label) for a, b in zip(before.arguments, now.arguments, strict=True)),
        tuple(_rows(a, b, label) for a, b in zip(before.outputs, now.outputs, strict=True)),
    )


_FEW, _MORE = 2, 3  # batch sizes of the two scouting passes


def _rows(few: torch.Size, more: torch.Size, label: str) -> Rows | None:
    if few == more:
        return None
    changed = [d for d in range(min(len(few), len(more))) if few[d] != more[d]]
    if len(few) != len(more) or len(changed) != 1 or few[changed[0]] * _MORE != more[changed[0]] * _FEW:
        raise Refused(mixing(label))
    return Rows(changed[0], few[changed[0]] // _FEW)


class _Record(_Follow):
    """The real pass: taps are attached where the plan says that parameters meet samples."""

    def __init__(self, parameters: Mapping[str, Tensor], plan: Plan, samples: int) -> None:
        super().__init__(parameters)
        self.plan = iter(plan)
        self.tape = Tape(samples)

    def touch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        call = next(self.plan, None)
        if call is None or call.function != function:
            raise InputError(
                f"the model took another path than on a small batch (at {getattr(function, '__name__', function)}); "
                "expected the same calls for every batch; use clipwise.oracle.per_sample for such a model"
            )
        if _fixed(call):
            return self.derive(function, args, kwargs)
        return meet(Meeting(self.tape, call, self.sources, args, kwargs))


@dataclass
class Capture:
    """Per-sample gradients of one model and loss; it remembers the plan of each batch shape that it has seen."""

    model: nn.Module
    loss: Loss
    plans: dict[Any, Plan] = field(default_factory=dict)

    def __call__(self, batch: Batch) -> SampleGradients:
        """The per-sample gradients of a batch."""
        parameters = trainable(self.model)
        samples = batch_size(batch)
        if not parameters:
            raise InputError("the model has no trainable parameter; write requires_grad_(True) on what is to train")
        if samples == 0:
            return SampleGradients({}, parameters, 0, torch.zeros(0))
        plan = self.plan(batch, parameters)
        with torch.enable_grad(), _Record(parameters, plan, samples) as record:
            losses = self.loss(self.model, batch)
        check_losses(losses, samples)
        records = record.tape.finish(losses, parameters)
        joint = {name: joined(records[name]) for name in parameters if name in records}
        return SampleGradients(joint, parameters, samples, losses.detach(), tuple(record.tape.sites))

    def plan(self, batch: Batch, parameters: Mapping[str, Tensor]) -> Plan:
        """Where the model's calls hold samples, for batches of this shape."""
        key = (
            tuple((t.shape[1:], t.dtype) for t in tensors(batch)),
            tuple(module.training for module in self.model.modules()),
            tuple(parameters),
            torch.is_autocast_enabled(),
        )
        if key not in self.plans:
            self.plans[key] = _scouted(self.model, self.loss, batch, parameters)
        return self.plans[key]


def per_sample(model: nn.Module, loss: Loss, batch: Batch) -> SampleGradients:
    """The gradient of each sample's loss, for ``loss(model, batch)`` that gives one value per sample.

    Guarantees: one forward and one backward pass; the model is not changed and nothing is left on it.
    Edge cases: an empty batch; a parameter that takes no part (``.unused``); an operation without a fast path
    (``.fallbacks``).
    """
    return Capture(model, loss)(batch)


def _scouted(model: nn.Module, loss: Loss, batch: Batch, parameters: Mapping[str, Tensor]) -> Plan:
    first: _Scout | None = None
    devices = {t.device for t in tensors(batch) if t.is_cuda}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for samples in (_FEW, _MORE):
            # copies of one sample: what depends on the data's values (trimming, say) is then the same in both
            copies = mapped(batch, functools.partial(_copies, samples=samples))
            follow = _Scout(parameters) if first is None else _Compare(parameters, first.log)
            with follow:
                losses = loss(model, copies)
            check_losses(losses, samples)
            first = first or follow
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # a spectral norm's power iteration, for one
            buffer.copy_(kept[name])
    assert isinstance(follow, _Compare)
    return tuple(follow.plan)


def _copies(rows: Tensor, samples: int) -> Tensor:
    return rows[:1].expand(samples, *rows.shape[1:]).clone() if rows.dim() else rows


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
        raise InputError(
            f"the loss must give one value per sample: expected shape [{samples}], got {got}; write for instance "
            "torch.nn.functional.cross_entropy(model(x), y, reduction='none')"
        )


def traced(
    model: nn.Module, loss: Loss, batch: Batch, then: Callable[[SampleGradients], Any]
) -> Callable[[dict[str, Tensor], Batch], Any]:
    """``then`` of the per-sample gradients, as one graph: a pure function of parameters and batch.

    Forward, backward, and whatever ``then`` makes of the records (norms, weights, sums) become one graph without side
    effects, so ``torch.compile(..., fullgraph=True)`` sees all of it. The graph is for batches of this shape.
    """
    class _Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch, samples: int, plan: Plan, parameters: dict[str, Tensor]) -> Any:
            with _Record(parameters, plan, samples) as record:
                losses = loss(self.model, batch)
            return losses, record

    samples = batch_size(batch)
    capture = Capture(model, loss)
    plan = capture.plan(batch, trainable(model))
    whole = _Loss()

    def function(parameters: dict[str, Tensor], batch: Batch) -> Any:
        own = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        swapped = {f"model.{name}": p for name, p in own.items()}
        with torch.enable_grad():
            losses, record = torch.func.functional_call(whole, swapped, (batch, samples, plan, own))
            records = record.tape.finish(losses, own)
        joint = {name: joined(records[name]) for name in own if name in records}
        return then(SampleGradients(joint, own, samples, losses.detach(), tuple(record.tape.sites)))

    return graph_of(function, {name: p.detach() for name, p in trainable(model).items()}, batch)


def graph_of(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """A function of tensors as one graph of tensor operations."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # fake tensors: a model that asks for values while it is traced (a mask's shortcut, say) then knows not to
    graph: Callable[..., Any] = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)
    return graph
