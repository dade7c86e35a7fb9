"""What a clipping method is: a frozen value.

Receives: a weight function with its bound, and what else the method asks for.
Gives: Method, whose ``blocks`` for given parameters are all that the step needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from clipwise.types import Citation, InputError, Released, positive

if TYPE_CHECKING:
    from torch import Tensor

Weigh: TypeAlias = "Callable[[Tensor], Tensor]"  # norms → weights, elementwise
Relation = Literal["add-remove", "replace-one"]


@dataclass(frozen=True)
class Block:
    """Parameters that are clipped together: a promise that w(n)·n ≤ bound for every norm n."""

    names: tuple[str, ...]
    weigh: Weigh
    bound: float
    share: float  # of the privacy loss; noise is σ·bound/√share


@dataclass(frozen=True)
class Count:
    """A noisy count released beside the gradient: each sample adds a value in [−½, ½]."""

    of: Weigh  # norms → values
    share: float


@dataclass(frozen=True)
class Method:
    """A clipping method. Combine by wrapping; nothing subclasses this.

    Guarantees: with ``bound`` C, ‖w_i v_i‖ ≤ C for every sample, whatever its gradient.
    ``after`` gives the method for the next step from what was released: the method is its own state.
    """

    name: str
    citation: Citation
    settings: Mapping[str, object]  # what to call the factory with to get this value again
    weigh: Weigh
    bound: float
    split: Callable[[Sequence[str]], tuple[Block, ...]] | None = None  # None: all parameters are one block
    count: Count | None = None
    after: Callable[[Released, float], Method] | None = None  # (released, expected batch) → next step's method

    def blocks(self, names: Sequence[str]) -> tuple[Block, ...]:
        """The blocks of a model with these parameters; their shares and the count's add up to one."""
        if self.split is not None:
            return self.split(names)
        return (Block(tuple(names), self.weigh, self.bound, 1.0 - (self.count.share if self.count else 0.0)),)

    def sensitivity(self, names: Sequence[str] = (), relation: Relation = "add-remove") -> float:
        """How far one sample moves the sum, jointly over all blocks: √Σ C_r²; twice that when it is replaced."""
        joint = math.hypot(*(block.bound for block in self.blocks(names))) if names else self.bound
        return 2 * joint if relation == "replace-one" else joint

    def next(self, released: Released, expected_batch: float) -> Method:
        """The method for the next step, computed from released values only."""
        return self if self.after is None else self.after(released, expected_batch)

    def __str__(self) -> str:
        """The expression that ``methods.parse`` turns into this method again."""
        return f"{self.name}({', '.join(f'{key}={_written(value)}' for key, value in self.settings.items())})"


def _written(value: object) -> str:
    if isinstance(value, Method):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    return repr(value)


def rescaled(method: Method, clip_norm: float) -> Method:
    """The same method with another clip norm."""
    from clipwise.methods import METHODS

    if "clip_norm" not in method.settings or method.count is not None or method.split is not None:
        raise InputError(f"expected a method with one clip norm such as flat(1.0), got {method}")
    return METHODS[method.name](**{**method.settings, "clip_norm": positive("clip_norm", clip_norm)})
