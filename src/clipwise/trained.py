"""Which models private runs have trained, and whose releases they are made of.

Receives: models, and the ledgers of runs.
Gives: note_trained, forget_trained; trained_by, the last run's ledger; trained_elsewhere, whether releases are missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn

from clipwise.accounting import Ledger
from clipwise.accounting.ledger import totals
from clipwise.types import Event

# a model, or a module in it that was trained → the ledger of the last private run that did so
_LEDGERS: WeakKeyDictionary[nn.Module, Ledger] = WeakKeyDictionary()


def note_trained(model: nn.Module, ledger: Ledger) -> None:
    """Remember whose releases a model and its parts are made of: they may be trained again, alone or in another."""
    if trained_by(model) is ledger:
        return
    for module in model.modules():
        if module is model or any(p.requires_grad for p in module.parameters(recurse=False)):
            _LEDGERS[module] = ledger


def forget_trained(model: nn.Module) -> None:
    """Forget who trained this model: nobody did, or what they released is counted."""
    for module in model.modules():
        _LEDGERS.pop(module, None)


def trained_by(model: nn.Module) -> Ledger | None:
    """The ledger of the last run that trained this model as a whole."""
    return _LEDGERS.get(model)


def trained_elsewhere(model: nn.Module, counted: Iterable[tuple[Event, int]]) -> bool:
    """Whether a private run trained this model, or a part of it, whose releases are not all among these."""
    own = totals(counted)
    known = {id(ledger): ledger for module in model.modules() if (ledger := _LEDGERS.get(module)) is not None}
    return any(totals(ledger.entries) - own for ledger in known.values())
