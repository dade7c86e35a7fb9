"""How a user's unmodified model is followed through its forward pass.

Receives: a model's calls, one by one, through a torch-function mode.
Gives: a Plan (where each call that touches a parameter holds samples), and with it a Tape of one real pass.

A *scouting* pass is made twice, the second time with more samples: what changed size holds samples ([sample, …],
[time, sample, …], [sample · time, …]); what did not is made of parameters alone. Nothing is hooked or patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipwise.records.composites import COMPOSITES
from clipwise.records.displacement import Own
from clipwise.records.layers import STEPPED, Meeting, meet, mixing, refuse_embedding
from clipwise.records.standardise import pulled_back, standardise
from clipwise.records.tape import Call, Lookup, Rows, Source, Tape
from clipwise.records.trees import mapped, tensors, vmapped
from clipwise.types import InputError, Refused

Plan = tuple[Call, ...]


class PathChanged(InputError):
    """The model made other calls than its plan says."""


# Calls that only look at a tensor, or turn it: how often a model makes them is no part of its path.
_QUERIES = frozenset("__get__ size dim numel stride data_ptr is_contiguous is_floating_point element_size".split())


class Follow(TorchFunctionMode):
    """Sees every call, knows which tensors are made of parameters alone, and takes composite functions apart."""

    def __init__(self, parameters: Mapping[str, Tensor], owns: Mapping[str, Own] | None = None) -> None:
        super().__init__()
        owns = owns or {}
        self.sources = {id(p): Source(p, frozenset([name]), own=owns.get(name)) for name, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Make one call, noting what it does with parameters."""
        kwargs = kwargs or {}
        touches = self.touches(args, kwargs)
        if getattr(function, "__name__", "") in _QUERIES:
            return self.derive(function, args, kwargs) if touches else function(*args, **kwargs)
        if function in (F.embedding, F.embedding_bag):  # of a frozen table too: it would be written into
            self.refuse(function, args, kwargs)
        if not touches:
            return self.other(function, args, kwargs)
        composite = COMPOSITES.get(function)
        if composite is not None:
            return composite(self, *args, **kwargs)
        return self.touch(function, args, kwargs)

    def refuse(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        """Stop before a look-up that would change the table."""
        given = {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}
        source = self.sources.get(id(given.get("weight")))
        names = ", ".join(sorted(source.names)) if source else "table"
        refuse_embedding(names, given.get("max_norm"), source is not None and given.get("scale_grad_by_freq", False))

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
        return Source(made, names, flipped=True, own=first.own)
    if plain and function is F.embedding and len(args) > 1 and args[1] is first.tensor:
        padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
        return Source(made, names, lookup=Lookup(args[0], padding))
    if function is standardise and all(source.tensor.is_leaf for source in found):
        return Source(made, names, pull=partial(_through_standardisation, args, kwargs["form"], found))
    return Source(made, names)


def _through_standardisation(
    args: tuple[Any, ...], form: str, found: Sequence[Source], gradients: Tensor
) -> dict[str, Tensor]:
    weight, gain = (*args, None)[:2]
    to_weight, to_gain = pulled_back(gradients, weight, gain, form=form)
    pulled = {source.tensor: to_weight if source.tensor is weight else to_gain for source in found}
    return {name: value for source in found for name in source.names if (value := pulled[source.tensor]) is not None}


def _is_transpose(function: Callable[..., Any], made: Tensor, of: Tensor) -> bool:
    name = getattr(function, "__name__", "")
    return name in _TRANSPOSES and made.shape == of.shape[::-1] and made.stride() == of.stride()[::-1]


_IN_PLACE = {f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow".split()}


def _changes(function: Callable[..., Any]) -> bool:
    """Whether a call changes its first argument."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _picks(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    name = getattr(function, "__name__", "")
    masks = name == "__getitem__" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors(*args[1:]))
    return masks or name in ("masked_select", "nonzero", "argwhere")


@dataclass
class _Sizes:
    """One call of a scouting pass."""

    function: Callable[..., Any]
    arguments: list[torch.Size]
    outputs: list[torch.Size]


class Scout(Follow):
    """First pass: writes down the sizes of every call."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.log: list[_Sizes] = []

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Any call."""
        before = [t.shape for t in tensors(args, kwargs)]
        result = function(*args, **kwargs)
        self.log.append(_Sizes(function, before, [t.shape for t in tensors(result)]))
        return result

    touch = other


class Compare(Scout):
    """Second pass, with one more sample: what changed size holds samples."""

    def __init__(self, parameters: Mapping[str, Tensor], log: Sequence[_Sizes], few: int, more: int) -> None:
        super().__init__(parameters)
        self.first, self.few, self.more = log, few, more
        self.calls: list[Call] = []
        self.made: list[list[tuple[Tensor, int]]] = []  # by each of them, with their versions then
        # tensors with as many entries as the data's values say, of all samples in one dimension
        self.picked: dict[int, Tensor] = {}

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Any call: what a mask of the samples' own picked is remembered, and what has as many entries since."""
        index, given = len(self.log), list(tensors(args, kwargs))
        result = super().other(function, args, kwargs)
        # a mask that is the same for all samples keeps its size in both passes, and picks equally many of each
        same = index < len(self.first) and self.first[index].arguments[1:] == self.log[index].arguments[1:]
        picks = _picks(function, args) and not (same and len(given) > 1)
        lengths = {len(t) for t in given if id(t) in self.picked}
        self.picked |= {id(t): t for t in tensors(result) if t.dim() and (picks or len(t) in lengths)}
        return result

    def touch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call with parameters: one entry of the plan."""
        index = len(self.log)
        picked = any(id(t) in self.picked for t in tensors(args, kwargs))
        result = self.other(function, args, kwargs)
        call = self._call(self.first[index] if index < len(self.first) else None, self.log[index])
        if picked:
            raise InputError(
                f"{call.label} gets entries of all samples in one dimension after some were picked by a mask, so it is "
                "not known which sample each belongs to; keep samples padded to one length, and mask the loss"
            )
        self.calls.append(call)
        self.made.append([(t, t._version) for t in tensors(result)])
        return self.derive(lambda *_, **__: result, args, kwargs) if _fixed(call) else result

    def plan(self) -> Plan:
        """The calls of the whole pass, when it is over."""
        return tuple(
            replace(call, overwritten=any(t._version != version for t, version in made))
            for call, made in zip(self.calls, self.made, strict=True)
        )

    def _call(self, before: _Sizes | None, now: _Sizes) -> Call:
        if (
            before is None
            or before.function != now.function
            or len(before.arguments) != len(now.arguments)
            or len(before.outputs) != len(now.outputs)
        ):
            raise PathChanged(
                f"the model takes a different path for {self.few} samples than for {self.more}; expected the same "
                "calls for every batch size: call each layer once for the whole batch, not for each sample; a "
                "recurrent layer may need batch_first=True"
            )
        label = getattr(now.function, "__name__", str(now.function))
        return Call(
            now.function,
            tuple(self._rows(a, b, label) for a, b in zip(before.arguments, now.arguments, strict=True)),
            tuple(self._rows(a, b, label) for a, b in zip(before.outputs, now.outputs, strict=True)),
        )

    def _rows(self, few: torch.Size, more: torch.Size, label: str) -> Rows | None:
        if few == more:
            return None
        changed = [d for d in range(min(len(few), len(more))) if few[d] != more[d]]
        if len(few) != len(more) or len(changed) != 1:
            raise Refused(mixing(label))
        dim = changed[0]
        factor, left = divmod(few[dim], self.few)
        if left or more[dim] != factor * self.more:
            raise Refused(mixing(label))
        return Rows(dim, factor)


def _fixed(call: Call) -> bool:
    return all(rows is None for rows in (*call.arguments, *call.outputs))


class Recorder(Follow):
    """The real pass: taps are attached where the plan says that parameters meet samples.

    With ``owns`` it is a displaced pass: each unit has its own values in these parameters' places, and in the place of
    whatever the model makes from them; ``dual``: the values carry forward-mode derivatives.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], plan: Plan, samples: int, owns: Mapping[str, Own] | None, dual: bool
    ) -> None:
        super().__init__(parameters, owns)
        self.plan = iter(plan)
        self.tape = Tape(samples, owns or {}, dual)
        # constants that the model made from displaced parameters (detach), with each unit's own
        self.constants: dict[int, tuple[Tensor, Own]] = {}

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call without parameters; what it makes of displaced constants alone is one too."""
        if self.tape.dual:
            function = STEPPED.get(function, function)
        result = function(*args, **kwargs)
        given = list(tensors(args, kwargs)) if self.constants else []
        if given and all(id(t) in self.constants for t in given):
            self._displace(function, args, kwargs, result)
        return result

    def derive(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """The same; in a displaced pass also what each unit has in the result's place."""
        result = super().derive(function, args, kwargs)
        if self.tape.owns:
            self._displace(function, args, kwargs, result)
        return result

    def _displace(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        owns = {id(t): own for t in tensors(args, kwargs) if (own := self._own(t)) is not None}
        made, changes = list(tensors(result)), _changes(function)
        if not owns or not (made or changes):
            return
        if any((s := self.sources.get(id(t))) is not None and s.flipped and s.own is not None for t in made):
            return  # a transpose has its parameter's

        def call(*own_args: Any, **own_kwargs: Any) -> Any:
            if not changes:
                return function(*own_args, **own_kwargs)
            first = own_args[0].clone()
            function(first, *own_args[1:], **own_kwargs)
            return first

        def place(tensor: Tensor) -> tuple[Tensor, int | None]:
            own = owns.get(id(tensor))
            return (tensor, None) if own is None else (own.value, 0)

        try:
            values = list(tensors(vmapped(call, args, kwargs, place, "same")))
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"cannot follow displaced parameters through {getattr(function, '__name__', function)} "
                f"({str(error).splitlines()[0]}); write a method without displacement, or freeze the parameter"
            ) from error
        views = next(iter(owns.values())).views
        for tensor, value in zip([args[0]] if changes else made, values, strict=True):
            own, source = Own(views, lambda value=value: value), self.sources.get(id(tensor))  # type: ignore[misc]
            if source is None:
                self.constants[id(tensor)] = (tensor, own)
            elif not source.tensor.is_leaf:
                self.sources[id(tensor)] = replace(source, own=own)

    def _own(self, tensor: Tensor) -> Own | None:
        source = self.sources.get(id(tensor))
        if source is None:
            return self.constants[id(tensor)][1] if id(tensor) in self.constants else None
        return source.own.turned() if source.own is not None and source.flipped else source.own

    def touch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A call with parameters, by the next entry of the plan."""
        call = next(self.plan, None)
        given = list(tensors(args, kwargs))
        if call is None or call.function != function or len(call.arguments) != len(given):
            raise PathChanged(
                f"the model took another path than before (at {getattr(function, '__name__', function)}); expected "
                "the same calls for every batch: let no layer be called or left out by what the samples are"
            )
        if _fixed(call):
            return self.derive(function, args, kwargs)
        for tensor, rows in zip(given, call.arguments, strict=True):
            if rows is not None and tensor.shape[rows.dim] != rows.factor * self.tape.samples:
                raise PathChanged(
                    f"{call.label} got {tensor.shape[rows.dim]} rows for {self.tape.samples} samples, expected "
                    f"{rows.factor} for each; pad samples to one length, or use clipwise.oracle.per_sample"
                )
        result = meet(Meeting(self.tape, call, self.sources, args, kwargs, given))
        # a tap's output shares its memory with what it taps, and autograd lets nobody write into such a one
        return mapped(result, torch.clone) if call.overwritten else result
