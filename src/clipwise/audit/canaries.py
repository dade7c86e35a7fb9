"""Canaries: small training problems in which one sample does to a method the worst that it allows.

Receives: a method.
Gives: Worlds, by the table CANARIES: a model that is linear in its parameters, rows whose gradients are known, and
scores that say how much of each canary is in a release.

The model's output is ⟨θ, x⟩ and a row's loss is slope · ⟨θ, x⟩ + ½ curvature · ⟨θ, x⟩², so that at θ = 0 a row's
gradient is slope · x: whoever writes the row writes the gradient. Each canary has a coordinate of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from clipwise.methods import Method
from clipwise.models import Accompanied
from clipwise.step import weigh
from clipwise.types import Batch, Gradient

LAYERS = ("first", "second")  # two, so that methods with blocks have some
SIDE = 8  # of a picture that the model does not look at: views are made of it
STEEP = 1e-3  # slope of a canary whose gradient comes from curvature
# lengths that are tried, in units of the bound: just below a threshold, or far beyond a clip norm
LENGTHS = (1 - 1e-4, 1e3, 1e6, 1e9)


@dataclass(frozen=True)
class World:
    """A training problem with canaries: rows 0 … canaries − 1 of the data, each in its coordinate of every layer.

    The coordinates from ``canaries`` on belong to nobody: what a release holds there is what it would hold of a canary
    that is not in the data.
    """

    name: str
    method: Method
    layers: tuple[str, ...]
    data: tuple[Tensor, ...]  # pictures, x [row, layer, coordinate], slopes, curvatures
    canaries: int
    coordinates: int
    rate: float = 0.5  # of sampling
    mates: tuple[int, ...] | None = None  # the other rows that a step must have drawn to be looked at; None: any
    counts: bool = False  # the canary's part in a noisy count is looked at too
    chunk: int | None = None

    def model(self) -> nn.Module:
        """The model at θ = 0."""
        if not self.method.companions:
            return Linear(self.layers, self.coordinates)
        norm = nn.BatchNorm1d(len(self.layers) * self.coordinates, affine=False)
        return Accompanied(Linear(self.layers, self.coordinates, norm), self.public, self.method.companions)

    @property
    def public(self) -> Tensor:
        """Inputs for methods that take public ones."""
        return torch.zeros(2, len(self.layers), self.coordinates)

    def scores(self, method: Method, released: Gradient) -> Tensor:
        """How much of each coordinate's canary a noisy sum holds: 1 is one whole canary, the noise's deviation is σ.

        Block r has share p_r, and a canary moves it by its bound C_r along u_r, so Σ_r p_r ⟨s̃_r, u_r⟩/C_r is the
        likelihood ratio's statistic: its mean is Σ p_r = 1, and its variance Σ p_r² σ²/p_r = σ².
        """
        total = torch.zeros(self.coordinates, dtype=torch.float64)
        for block in method.blocks(tuple(released)):
            along = torch.stack([released[name].double().flatten() for name in block.names]).sum(0)
            total += block.share / (method.moves * block.bound) * along / math.sqrt(len(block.names))
        return total


class Linear(nn.Module):
    """⟨θ, x⟩ for rows x [row, layer, coordinate], normalised or not: a weight for each layer, all zero at first."""

    def __init__(self, layers: tuple[str, ...], coordinates: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers
        for path in layers:
            *outer, last = path.split(".")
            place: nn.Module = self
            for name in outer:
                if name not in dict(place.named_children()):
                    place.add_module(name, nn.Module())
                place = place.get_submodule(name)
            place.add_module(last, nn.Linear(coordinates, 1, bias=False))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Tensor) -> Tensor:
        """[row]."""
        x = self.norm(x.flatten(1)).view_as(x)
        parts = [self.get_submodule(path)(x[:, i]) for i, path in enumerate(self.layers)]
        return torch.stack(parts).sum(0).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Slope · ⟨θ, x⟩ + ½ curvature · ⟨θ, x⟩², one value per row."""
    first, x, slope, curvature = batch
    along = model(first if isinstance(model, Accompanied) else x)
    return slope * along + 0.5 * curvature * along * along


def rows(method: Method, x: Tensor, slope: float = 1.0, curvature: Tensor | None = None) -> tuple[Tensor, ...]:
    """Data of these gradients: what methods with views or companions look at, x, slopes and curvatures."""
    slopes, flat = torch.full((len(x),), slope), torch.zeros(len(x))
    first = torch.zeros(len(x), 1, SIDE, SIDE)
    if method.companions:
        # beside p rows of zeros, a normalised entry is ±√p whatever its length, which must come from the slope
        first, slopes = 1e3 * x.sign(), slopes * x.flatten(1).abs().amax(1) / math.sqrt(method.companions)
    return first, x, slopes, flat if curvature is None else curvature


def saturating(method: Method, canaries: int, coordinates: int | None = None) -> World:
    """Every block gets as much as the method lets through: far beyond the clip norm, or just below a threshold."""
    layers = _layers(method)
    coordinates = 2 * canaries if coordinates is None else coordinates
    x = torch.zeros(canaries, len(layers), coordinates)
    each = torch.arange(canaries)
    x[each, :, each] = _lengths(method, layers)
    # one momentum per sample is for full batches: there every canary takes part in every step
    rate = 1.0 if method.recall is not None else 0.5
    return World("saturating", method, layers, rows(method, x), canaries, coordinates, rate)


def curved(method: Method, canaries: int) -> World:
    """BAM: hardly a gradient where the model stands, and all of it at the end of the sample's own displacement."""
    world = saturating(method, canaries)
    x, radius = world.data[1], next(float(str(m.settings["radius"])) for m in active(method) if m.name == "bam")
    if radius == 0:
        return world
    # at θ = λ x/‖x‖ the gradient is (slope + curvature · λ ‖x‖) x: all of x, since the two add up to 1
    curvature = (1 - STEEP) / (radius * torch.linalg.vector_norm(x.flatten(1), dim=1))
    return replace(world, name="curved", data=rows(method, x, STEEP, curvature))


def turning(method: Method, canaries: int) -> World:
    """Units of several samples: the canary turns its mate's term around, which moves the sum by two bounds."""
    world = saturating(method, 1)
    x = world.data[1]
    return replace(world, name="turning", data=rows(method, torch.cat([2 * x, -x])), mates=(1,))


def counted(method: Method, canaries: int) -> World:
    """Adaptive: the canary's norm is above the clip norm, so that it moves sum and count at once."""
    world = saturating(method, 1)
    x = world.data[1]
    return replace(world, name="counted", data=rows(method, torch.cat([x, 0 * x])), mates=(), counts=True)


def flooding(method: Method, canaries: int) -> World:
    """DiceSGD's counterexample: what is cut off others keeps the feedback at −c2, and the canary turns it to +c2."""
    world = saturating(method, 1)
    size = 2 * groups(method)
    x = world.data[1]
    x = torch.cat([LENGTHS[1] * x, *[-x] * (size - 1)])  # the canary outweighs all that was cut off the others
    return replace(world, name="flooding", data=rows(method, x), rate=1 / size)


def staying(method: Method, canaries: int) -> World:
    """The same, and the canary is drawn whenever it may be: without luck runs show twice what a draw moves."""
    return replace(flooding(method, canaries), name="flooding, drawn", rate=1 / groups(method))


def groups(method: Method) -> int:
    """How many groups of samples take turns."""
    return 1 if method.feedback is None else method.feedback.groups


Plant: TypeAlias = Callable[[Method, int], World]
# A new method's line: the canaries that do the worst to it. Wrappers are audited with those of what they wrap, too.
CANARIES: dict[str, tuple[Plant, ...]] = {
    "flat": (saturating,),
    "normalised": (saturating,),
    "automatic": (saturating,),
    "psac": (saturating,),
    "global_": (saturating,),
    "layerwise": (saturating,),
    "adaptive": (saturating, counted),
    "schedule": (saturating,),
    "inner_momentum": (saturating,),
    "momentum_per_sample": (saturating,),
    "self_augmentation": (saturating,),
    "bam": (saturating, curved),
    "dp_sat": (saturating,),
    "disk": (saturating,),
    "batch_clipping": (saturating,),
    "p_average": (turning,),
    "dice": (flooding, staying),
}


def active(method: Method) -> Iterator[Method]:
    """The method and what it is made of at its present step, from the outside to the inside."""
    yield method
    base, phases = method.settings.get("base"), method.settings.get("phases")
    if isinstance(phases, tuple):
        step = int(str(method.settings["step"]))
        base = [inner for first, inner in phases if first <= step][-1]
    if isinstance(base, Method):
        yield from active(base)


def worlds(method: Method, canaries: int) -> tuple[World, ...]:
    """Every world that the table has for this method, each in ``canaries`` copies where copies do not meet."""
    found: list[World] = []
    plan = method.phases
    for number, now in enumerate(plan, start=1):
        names = [inner.name for inner in active(now)]
        plants = dict.fromkeys(plant for name in names for plant in CANARIES.get(name, (saturating,)))
        if now.companions:  # their normalisation leaves no room for curvature
            plants.pop(curved, None)
        if turning in plants or flooding in plants:  # canaries that share a unit or a feedback weaken each other
            plants = {plant: None for plant in plants if plant in (turning, flooding, staying)}
        made = [plant(now, canaries) for plant in plants]
        found += made if len(plan) == 1 else [replace(w, name=f"{w.name}, phase {number}") for w in made]
    return tuple(found)


def _layers(method: Method) -> tuple[str, ...]:
    """Names of layers that fill every block that the method names, in any of its phases."""
    bases = (inner.settings.get("base") for phase in method.phases for inner in active(phase))
    keys = (str(key) for base in bases if isinstance(base, Mapping) for key in base)
    return tuple(dict.fromkeys(key.strip(".") or "rest" for key in keys)) or LAYERS


def _lengths(method: Method, layers: tuple[str, ...]) -> Tensor:
    """The length of a canary's gradient in each layer: the one at which its block keeps the most."""
    found = {}
    for block in method.blocks(tuple(f"{layer}.weight" for layer in layers)):
        tried = block.bound * torch.tensor(LENGTHS, dtype=torch.float64)
        kept = weigh([block], tried[:, None])[:, 0] * tried
        length = float(tried[int(kept.argmax())]) * method.unit / math.sqrt(len(block.names))
        found.update(dict.fromkeys(block.names, length))
    return torch.tensor([found[f"{layer}.weight"] for layer in layers])
