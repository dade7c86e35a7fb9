"""An optimizer that steps for one private run alone.

Receives: the optimizer of a run.
Gives: Guarded, whose ``step`` is the only way to a step of it until another run takes the optimizer over.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from clipwise.types import Refused

# optimizer → the hook that keeps it to its private run; a later run of the same optimizer takes its place
_HOOKS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class Guarded:
    """Guarantees: no step of the optimizer is made that no statement would cover."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Keep the optimizer to this run from now on."""
        self._optimizer, self._stepping = optimizer, False
        if optimizer in _HOOKS:
            _HOOKS[optimizer].remove()
        _HOOKS[optimizer] = optimizer.register_step_pre_hook(self._refuse_others)

    def step(self) -> None:
        """One step, from the gradients that its parameters hold now; they hold none afterwards."""
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False
            self._optimizer.zero_grad(set_to_none=True)

    def _refuse_others(self, *_: Any) -> None:
        if not self._stepping:
            raise Refused(
                "this optimizer belongs to a private run, and a step of its own would use gradients without noise; "
                "write private.step(batch) instead of loss.backward() and optimizer.step()"
            )
