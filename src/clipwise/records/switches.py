"""Flags and names by which a loss or a model becomes another one, where they are no attributes of its modules.

Receives: a model and its loss.
Gives: switches, a key of all that are seen: those that the loss or a forward pass names, and those of settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from clipwise.data.named import named
from clipwise.records.capture import Loss
from clipwise.records.states import SWITCHES, Modes, modes

_EVERY = vars(nn.Module()).keys()


def switches(model: nn.Module, loss: Loss) -> Modes:
    """A key of what the loss and the model look at: while it is the same, the self-test need not be repeated.

    Flags and names that code mentions, the modes of other modules that the loss names, and flags and names in the
    objects and dictionaries that modules hold as their settings.
    """
    found: list[Any] = []
    seen = {id(model)}
    own = [module for module in model.modules() if not type(module).__module__.startswith("torch.")]
    for value in _named(own, loss):
        if type(value) in SWITCHES:
            found.append(value)
        elif isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            found += modes(value, ())
    for module in own:
        for name, value in module.__dict__.items():
            # their own flags are in ``modes``
            if name not in _EVERY and id(value) not in seen and not isinstance(value, (*SWITCHES, Tensor, nn.Module)):
                seen.add(id(value))
                values = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
                found += [each for each in values if type(each) in SWITCHES]
    return tuple(found)


def _named(modules: Iterable[nn.Module], loss: Loss) -> Iterator[Any]:
    yield from (value for _, value in named(loss))
    for kind in {type(module): None for module in modules}:  # in their order
        yield from (value for _, value in named(kind.forward))
