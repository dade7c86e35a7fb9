"""The engine that a method's probe sees: gradients of a chunk's samples, at the points that it asks for.

Receives: a capture (model and loss), what is public (earlier iterates, the last release, public inputs), and a seed.
Gives: ChunkEngine, which satisfies ``methods.Engine``; ``at``, ``back``, ``displaced`` and ``curved`` are the same
engine elsewhere; one_by_one, for a user's own views.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.data.views import draws, views
from clipwise.methods import Method, Steady
from clipwise.records import Capture, SampleGradients, ascent, batch_size, device_of, swapped, trainable
from clipwise.records.compiled import CompiledCapture
from clipwise.records.trees import mapped, row, tensors
from clipwise.types import Batch, Gradient, InputError

# (rows, count, generator) → count views of each row, a row's views together
Views: TypeAlias = Callable[[Batch, int, torch.Generator], Batch]


@dataclass(frozen=True)
class ChunkEngine:
    """An engine for one chunk of one step; views and companions follow its seed, so asking again repeats them."""

    capture: Capture
    keys: Tensor  # the rows' samples: what is drawn for one depends on its number and the seed alone
    seed: int | Tensor = 0  # a tensor where a step is compiled, which keeps any other number for good
    past: tuple[Gradient, ...] = ()
    released: Gradient | None = None
    own_views: Views | None = None
    public: Tensor | None = None
    fast: CompiledCapture | None = None
    point: Gradient | None = None  # None: the model's own parameters
    along: SampleGradients | None = None  # v_i; None: neither displaced nor curved
    radius: float | None = None  # of the displacement along v_i; None: H_i v_i

    @property
    def parameters(self) -> Gradient:
        """θ_t, or the point that ``at`` gave."""
        return {n: p.detach() for n, p in trainable(self.capture.model).items()} if self.point is None else self.point

    def of(self, method: Method, rows: Batch) -> SampleGradients:
        """The method's v_i, one for each row: by one compiled graph where its probe is the same at every step.

        Not in the first steps, which know fewer iterates: each would need a graph of its own.
        """
        probe = method.probe
        if self.fast is None or not isinstance(probe, Steady) or len(self.past) < method.past:
            return method.gradients(self, rows)

        def run(batch: Batch, past: tuple[Gradient, ...], seed: Tensor) -> SampleGradients:
            rows, keys = batch
            return probe(replace(self, keys=keys, seed=seed, past=past, fast=None), rows)

        device = device_of(self.capture.model)
        batch, seed = (rows, self.keys.to(device)), torch.tensor(self.seed, device=device)
        return self.fast.of(run, probe, batch, self.past[: method.past], seed, each=method.rows)

    def gradients(self, rows: Batch) -> SampleGradients:
        """One forward and one backward pass here; compiled, at θ itself."""
        point = self.point and {name: p.detach().requires_grad_() for name, p in self.point.items()}
        with nullcontext() if point is None else swapped(self.capture.model, point):
            if self.along is None:
                return self.capture(rows) if self.fast is None or point is not None else self.fast(rows)
            if self.radius is None:
                return ascent.curvature(self.capture, rows, self.along)
            return ascent.displaced(self.capture, rows, self.along, self.radius)

    def at(self, parameters: Gradient) -> ChunkEngine:
        """The same at another point, made of released values only."""
        return replace(self, point=parameters)

    def back(self, steps: int) -> ChunkEngine:
        """The same at θ_{t − steps}, whose past is what was before it."""
        return replace(self, point=self.past[steps - 1], past=self.past[steps:])

    def displaced(self, along: SampleGradients, radius: float) -> ChunkEngine:
        """The same at θ + radius · v_i/‖v_i‖."""
        if self.along is not None:
            raise InputError("a displacement of a displacement has no fast form; write bam(…) only once in a method")
        return replace(self, along=along, radius=radius)

    def curved(self, along: SampleGradients) -> ChunkEngine:
        """H_i v_i in the place of gradients."""
        if self.along is not None:
            raise InputError("curvature at a displaced point has no fast form; write bam(…) only once in a method")
        return replace(self, along=along)

    def views(self, rows: Batch, count: int, augment: str) -> Batch:
        """``count`` views of each row, a row's views together; of the batch's first tensor, the others are repeated."""
        if augment == "own":
            if self.own_views is None:
                raise InputError("augment='own' needs your function of views; write make_private(…, views=function)")
            generator = torch.Generator(next(tensors(rows)).device).manual_seed(int(self.seed))
            return self.own_views(rows, count, generator)
        first, keys = next(tensors(rows)), self._keys(batch_size(rows))
        return mapped(
            rows, lambda t: views(t, count, self.seed, augment, keys) if t is first else t.repeat_interleave(count, 0)
        )

    def companions(self, rows: Batch, count: int) -> Batch:
        """Inputs [row, 1 + count, …]: each followed by random public ones."""
        if self.public is None:
            raise InputError("batch_clipping needs public inputs; write make_private(…, public=inputs)")
        first, size = next(tensors(rows)), batch_size(rows)
        if self.public.shape[1:] != first.shape[1:]:
            raise InputError(f"public inputs must be {list(first.shape[1:])} each, got {list(self.public.shape[1:])}")
        chosen = draws(self._keys(size).to(first.device), count, self.seed) % len(self.public)  # [row, companion]
        beside = self.public.to(first.device)[chosen]
        return mapped(rows, lambda t: torch.cat([t[:, None], beside], 1) if t is first else t)

    def _keys(self, rows: int) -> Tensor:
        """A key for each row, also where rows are several views of each sample."""
        return self.keys if len(self.keys) == rows else self.keys.repeat_interleave(rows // len(self.keys))


def one_by_one(views: Views, samples: Tensor, seed: int) -> Views:
    """The user's function given one row at a time, with a generator for that row alone.

    It sees no other row, so it cannot mix them; and whoever else was drawn, a sample's views stay its own.
    """

    def each(rows: Batch, count: int, generator: torch.Generator) -> Batch:
        if not batch_size(rows):
            return rows
        keys = draws(samples, batch_size(rows) // len(samples), seed).flatten().tolist()  # a row may be itself a view
        made = []
        for i, key in enumerate(keys):
            made.append(views(row(rows, i), count, generator.manual_seed(key)))
            if batch_size(made[-1]) != count:
                raise InputError(f"views must give the {count} views of a row, got {batch_size(made[-1])} rows")
        columns = (
            torch.cat(column) if column[0].dim() else column[0] for column in zip(*map(tensors, made), strict=True)
        )
        return mapped(made[0], lambda t: next(columns))

    return each
