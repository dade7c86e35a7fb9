"""What a clipping method is: a frozen value.

Receives: a weight function with its bound, where gradients are taken, and what else the method asks for.
Gives: Method, whose ``blocks`` for given parameters and whose ``gradients`` of a chunk are all that a step needs;
papers, what to cite for methods and post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from clipwise.types import Batch, Citation, Gradient, InputError, Memory, Released, at_least_zero, positive

if TYPE_CHECKING:
    from torch import Tensor

    from clipwise.records import SampleGradients

Weigh: TypeAlias = "Callable[[Tensor], Tensor]"  # norms → weights, elementwise
Probe: TypeAlias = "Callable[[Engine, Batch], SampleGradients]"


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
class Steady:
    """A probe that asks for the same at every step, in which only tensors change: it can be compiled.

    A value: two of the same method, settings and base are equal, so that what was compiled of one serves for the other.
    """

    probe: Probe = field(compare=False)
    of: tuple[object, ...]  # the method's name and settings, and the base's probe

    def __call__(self, engine: Engine, rows: Batch) -> SampleGradients:
        """v_i of each row."""
        return self.probe(engine, rows)


class Engine(Protocol):
    """What a method may ask for: gradients of a chunk's samples, at released points or at a sample's own.

    v_i = Σ_k c_k ∇ℓ_i(θ_k + δ_ik ; T_k x_i): ``at`` and ``back`` move θ_k, ``displaced`` adds δ_ik, ``views`` gives
    T_k x_i.
    """

    @property
    def parameters(self) -> Gradient:
        """θ_t, or the point that ``at`` gave."""
        ...

    @property
    def past(self) -> tuple[Gradient, ...]:
        """θ_{t−1}, θ_{t−2}, …: as many as there are, at most ``Method.past``. Public."""
        ...

    @property
    def released(self) -> Gradient | None:
        """The last release over the expected number of units; None before the first. Public."""
        ...

    def gradients(self, rows: Batch) -> SampleGradients:
        """∇ℓ_i here, one unit per row."""
        ...

    def at(self, parameters: Gradient) -> Engine:
        """The same at another point, which must be made of released values only."""
        ...

    def back(self, steps: int) -> Engine:
        """The same at θ_{t − steps}, whose past is what was before it."""
        ...

    def displaced(self, along: SampleGradients, radius: float) -> Engine:
        """The same at θ + radius · v_i/‖v_i‖, each sample's own; with K rows per unit, K consecutive ones share it."""
        ...

    def curved(self, along: SampleGradients) -> Engine:
        """Gives H_i v_i, exactly, in the place of gradients; rows as for ``displaced``."""
        ...

    def views(self, rows: Batch, count: int, augment: str) -> Batch:
        """``count`` views of each row, a row's views together; the same ones whenever it is asked in this step."""
        ...

    def companions(self, rows: Batch, count: int) -> Batch:
        """Inputs [row, 1 + count, …]: each row followed by public ones; the same ones whenever it is asked."""
        ...


@dataclass(frozen=True)
class Feedback:
    """What clipping cut off, fed back into later sums (DiceSGD). It is private state that is never released."""

    clip_norm: float  # C2, on the scale of the mean gradient: the sum gets at most B · C2 of it
    memory: Memory
    blocks: int  # steps after which memory="blocks" forgets
    normalised: bool  # the automatic variant: C2 E/‖E‖ instead of clipping

    @property
    def groups(self) -> int:
        """How many groups of samples take turns, so that a step draws from one of them at so many times the rate."""
        return self.blocks if self.memory in ("blocks", "bounded") else 1


@dataclass(frozen=True, repr=False)
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
    after: Callable[[Released, float], Method] | None = None  # (released, expected units) → next step's method
    later: Callable[[], tuple[Method, ...]] | None = None  # the method as it begins each of its later phases
    probe: Probe | None = None  # where gradients are taken; None: at θ
    past: int = 0  # earlier iterates that the probe looks at
    rows: int = 1  # rows that go through the model for one sample
    companions: int = 0  # public inputs that go through the model with each sample
    unit: int = 1  # private samples that are averaged before they are weighed
    recall: float | None = None  # γ of one momentum per sample: v ← γ v + (1 − γ) v of the step before
    feedback: Feedback | None = None

    def __post_init__(self) -> None:
        """Fix the settings: they say what the method is."""
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def __deepcopy__(self, memo: object) -> Self:
        """The value itself: nothing of it can change."""
        return self

    def blocks(self, names: Sequence[str]) -> tuple[Block, ...]:
        """The blocks of a model with these parameters; their shares and the count's add up to one."""
        if self.split is not None:
            return self.split(tuple(names))
        return (Block(tuple(names), self.weigh, self.bound, 1.0 - (self.count.share if self.count else 0.0)),)

    def sensitivity(self, names: Sequence[str] = ()) -> float:
        """How far adding or removing one sample moves the sum, jointly over all blocks: √Σ C_r²."""
        joint = math.hypot(*(block.bound for block in self.blocks(names))) if names else self.bound
        return joint * self.moves

    @property
    def moves(self) -> int:
        """How many bounds one sample can move the sum by: in a unit with others it may turn their average around."""
        return 1 if self.unit == 1 else 2

    def gradients(self, engine: Engine, rows: Batch) -> SampleGradients:
        """v_i of each row: where the probe says, or at θ."""
        return engine.gradients(rows) if self.probe is None else self.probe(engine, rows)

    def next(self, released: Released, units: float) -> Method:
        """The method for the next step, computed from released values only; ``units`` is how many were expected."""
        return self if self.after is None else self.after(released, units)

    @property
    def phases(self) -> tuple[Method, ...]:
        """The method now and as it begins each of its later phases; most have one."""
        return (self,) if self.later is None else (self, *self.later())

    def parts(self) -> Iterator[Method]:
        """The method and those it is made of."""
        yield self
        yield from _within(self.settings)

    def __str__(self) -> str:
        """The expression that ``methods.parse`` turns into this method again."""
        return f"{self.name}({', '.join(f'{key}={_expression(value)}' for key, value in self.settings.items())})"

    __repr__ = __str__


def length(name: str, value: float, *, least: float = 1e-18) -> float:
    """The value, if float32 can hold its square; norms and weights beyond that are not finite, or nothing is left."""
    value = positive(name, value) if least else at_least_zero(name, value)
    if not least <= value <= 1e18:
        raise InputError(
            f"{name} must be from {least:g} to 1e+18, so that float32 can hold its square, got {value!r}: "
            "write a number nearer to 1"
        )
    return value


def base_of(factory: Callable[..., Method], base: Method | None, default: Callable[[], Method]) -> Method:
    """The method that a factory is to wrap: the one given, or the default."""
    method = default() if base is None else base
    if not isinstance(method, Method):
        raise InputError(f"{factory.__name__} takes a method such as flat(1.0), got {base!r}")
    return method


def wrapped(
    base: Method,
    factory: Callable[..., Method],
    settings: Mapping[str, object],
    *,
    steady: bool = False,
    **changes: object,
) -> Method:
    """``factory(base, **settings)``: the base method with some of its parts changed, at this step and at later ones.

    ``steady``: the new probe asks for the same at every step, as far as the base's does.
    """
    if steady and (base.probe is None or isinstance(base.probe, Steady)):
        probe: Probe = changes["probe"]  # type: ignore[assignment]
        changes["probe"] = Steady(probe, (factory.__name__, *settings.items(), base.probe))

    def after(released: Released, units: float) -> Method:
        return factory(base.next(released, units), **settings)

    def later() -> tuple[Method, ...]:
        return tuple(factory(phase, **settings) for phase in base.phases[1:])

    return replace(
        base,
        name=factory.__name__,
        settings={"base": base, **settings},
        after=None if base.after is None else after,
        later=None if base.later is None else later,
        **changes,  # type: ignore[arg-type]
    )


class Cited(Protocol):
    """What has a name and perhaps a paper behind it: a method, or post-processing of what it released."""

    @property
    def name(self) -> str:
        """As it is called in an expression."""
        ...

    @property
    def citation(self) -> Citation | None:
        """Where it comes from."""
        ...

    def parts(self) -> Iterator[Cited]:
        """All that it is made of."""
        ...


def papers(cited: Iterable[Cited]) -> dict[Citation, list[str]]:
    """What to cite for these and what they are made of: each paper once, with the names that it stands for."""
    found: dict[Citation, list[str]] = {}
    for part in (part for one in cited for part in one.parts()):
        if part.citation is not None:
            names = found.setdefault(part.citation, [])
            names += [part.name] if part.name not in names else []
    return found


def _within(value: object) -> Iterator[Method]:
    if isinstance(value, Method):
        yield from value.parts()
    elif isinstance(value, Mapping):
        yield from _within(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _within(item)


def _expression(value: object) -> str:
    if isinstance(value, Method):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_expression(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_expression(item) for item in value) + "]"
    return repr(value)
