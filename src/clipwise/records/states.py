"""What a model holds, and how it is left as it was.

Receives: a model.
Gives: modes; held, copies of all that a forward pass could write to, and beside, of what is no buffer or parameter;
restored and unmoved, contexts that put it back; Buffers, the same for a step; same_numbers; twin, a model that has seen
what this one has, and goes on by itself; HOOKS, where a module keeps its own.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.records.capture import trainable
from clipwise.records.chance import kept
from clipwise.records.trees import mapped, tensors
from clipwise.types import InputError

Modes = tuple[Any, ...]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SWITCHES = (bool, str)  # attributes that make a module another function; of numbers, many count steps
TABLE = 2**22  # entries: a buffer of more is no statistic


def modes(model: nn.Module, trained: Iterable[str]) -> Modes:
    """A key of all that decides what the model computes; while it is the same, the self-test need not be repeated.

    It holds the modules, each with its switches (training mode, other flags) and hooks, and which parameters are
    trained.
    """
    everywhere = vars(nn.modules.module)
    found: list[Any] = [tuple(trained), *(number for kind in HOOKS for number in everywhere["_global" + kind])]
    for module in model.modules():  # many of them, in every step: one flat list
        own = module.__dict__
        # the objects themselves, as a forward in the place of its class's: the id of one that is gone may be another's
        found += module, type(module), own.get("forward"), *[v for v in own.values() if type(v) in SWITCHES]
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            found.append(tuple(number for kind in HOOKS for number in own[kind]))  # no two hooks ever have the same
    return tuple(found)


def held(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that a forward pass could write to and a checkpoint would hold."""
    return {**{name: value.detach().clone() for name, value in _writable(model).items()}, **beside(model)}


def beside(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what a checkpoint would hold beside buffers and parameters: states of modules' own."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    own = {name: value for name, value in model.state_dict().items() if name not in known}
    return {f"{name}[{i}]": t.detach().clone() for name, state in own.items() for i, t in enumerate(_numbers(state))}


class Buffers:
    """A model's buffers as they are now: those that may hold statistics or counts, fractions and single numbers."""

    def __init__(self, model: nn.Module) -> None:
        """Copy them, but for large tables."""
        self._model = model
        now = dict(model.named_buffers())
        self._names = set(now)
        self._before = {
            name: (buffer, buffer._version, buffer.detach().clone())
            for name, buffer in now.items()
            if buffer.layout == torch.strided
            and not buffer.is_inference()
            and (buffer.numel() == 1 or (buffer.is_floating_point() and buffer.numel() <= TABLE))
        }
        self._versions = {name: p._version for name, p in model.named_parameters() if not p.is_inference()}

    @property
    def kept(self) -> set[str]:
        """Those that are put back."""
        return set(self._before)

    def written(self) -> set[str]:
        """Those that hold other values now, or are new. On a GPU, what was written through ``.data`` is not seen."""
        return {name for name, _ in self._written()} | self._new()

    def parameters_written(self) -> set[str]:
        """Parameters that were written into, but for what was written through ``.data``."""
        now = {name: p._version for name, p in self._model.named_parameters() if name in self._versions}
        return {name for name, version in now.items() if version != self._versions[name]}

    def put_back(self) -> None:
        """Those that hold other values, as they were; new ones stay, since a module may rely on what it has made."""
        with torch.no_grad():
            for name, now in self._written():
                before = self._before[name][2]
                (now if now.shape == before.shape else now.resize_as_(before)).copy_(before)

    def remove_new(self) -> None:
        """None in the place of those that were not there."""
        for name in self._new():
            place, _, own = name.rpartition(".")
            self._model.get_submodule(place)._buffers[own] = None

    def _new(self) -> set[str]:
        return {name for name, _ in self._model.named_buffers()} - self._names

    def _written(self) -> list[tuple[str, Tensor]]:
        now = self._model.named_buffers() if self._before else ()
        return [(name, buffer) for name, buffer in now if name in self._before and self._differs(name, buffer)]

    def _differs(self, name: str, now: Tensor) -> bool:
        own, version, before = self._before[name]
        if now.is_cuda and now is own and now._version == version:
            return False  # to compare numbers is to wait for them
        return not same_numbers(now, before)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one format and hold the same numbers; what is none in both is the same."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or (
        one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )


def twin(model: nn.Module) -> nn.Module | None:
    """A copy with the same parameters and buffers, all else its own; None where a model cannot be copied."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}  # a large model is not held twice
    try:
        return copy.deepcopy(model, shared)
    except Exception:  # whatever its own attributes raise
        return None


def _numbers(state: Any) -> list[Tensor]:
    """A state's tensors, and the bytes of all else in it."""
    rest = pickle.dumps(mapped(state, lambda _: None))
    return [*tensors(state), torch.frombuffer(bytearray(rest), dtype=torch.uint8)]


def _writable(model: nn.Module) -> dict[str, Tensor]:
    """All that a forward pass could write to."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards training flags, buffers, parameters and random generators are what they were."""
    with put_back(model, dict(model.named_parameters())), unmoved(model):
        yield


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """The same without the parameters, for the passes in between: a spectral norm, say, moves its buffers in each."""
    flags = [(module, module.training) for module in model.modules()]
    states = [(m, copy.deepcopy(m.get_extra_state())) for m in model.modules() if _sets_extra_state(m)]
    try:
        devices = {p.device for p in trainable(model).values() if p.is_cuda}
        with kept(devices), put_back(model, dict(model.named_buffers())):
            yield
    finally:
        for module, flag in flags:
            module.training = flag
        for module, state in states:
            module.set_extra_state(state)


def _sets_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


@contextmanager
def put_back(model: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Afterwards these values, the model's own, are what they were."""
    before = {name: value.detach().clone() for name, value in values.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            # as they are now: a module may have put another tensor into its place
            known = {name: value for name, value in _writable(model).items() if name in before}
            for name, value in known.items():
                if value.shape == before[name].shape:
                    value.copy_(before[name])
        for name, value in known.items():
            if value.shape != before[name].shape:
                raise InputError(
                    f"a forward pass gave {name} the shape {list(value.shape)} for {list(before[name].shape)}: make it "
                    "as large as it will be before the run"
                )
