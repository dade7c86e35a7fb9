"""SampleGradients: v_1 … v_B over all parameters, held implicitly, with the algebra that every method needs.

Receives: each parameter's records.
Gives: scaling, sums, units, norms, inner products and weighted sums, without writing per-sample gradients out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from clipwise.records.forms import Form
from clipwise.records.kinds import Dense, Record, beside, cross, full_precision, joined, sq_norms, totals, wide
from clipwise.records.tape import Site
from clipwise.records.timing import timed
from clipwise.types import Gradient, InputError

Groups = Sequence[Sequence[str]]  # a partition of the parameters' names
# norms [sample, group] and which samples are real → weights, and which samples are finite (``step.Rule``)
FromNorms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
SMALL = 4096  # numbers of a parameter whose norm or sum takes a GPU less time than a launch
_Joined = tuple[dict[str, int], Tensor | None]  # sizes of small parameters; their gradients, [sample, number of any]


EXPLAINED = """
gram: two Gram matrices of the layer's positions; written: the gradient itself, kept for the weighted sum; streamed:
written a few samples at a time; fused: by a kernel; backward: falls out of the backward pass; vmap: no fast path.
The cheapest is chosen by counted multiplications; a written gradient must also fit in the memory that it frees. On a
GPU the fastest is: where milliseconds stand, norm and sum by each form were timed together, on random numbers."""


class Weighed(NamedTuple):
    """Norms and weights of a chunk, [sample, group] each, how many samples were left out, and whether a sum holds.

    To ask may be to wait for a GPU: last. A sum does not hold where a gradient that is not finite has a part in it,
    with whatever weight; it does where such gradients are exact zeros already.
    """

    norms: Tensor
    weights: Tensor
    lost: Callable[[], int]
    holds: Callable[[], bool]


@dataclass(frozen=True, repr=False)
class SampleGradients:
    """The per-sample gradients of one batch.

    Guarantees: the same numbers as ``clipwise.oracle.per_sample`` up to rounding; norms are not under-estimated.
    Edge cases: an empty batch has norms of shape [0] and sums of zero; a parameter that took no part is zero.
    """

    records: Mapping[str, tuple[Record, ...]]
    like: Mapping[str, Tensor]  # the parameters: shapes, formats and devices only
    samples: int
    losses: Tensor | None = field(default=None, repr=False)  # private, one per sample
    sites: tuple[Site, ...] = field(default=(), repr=False)
    _joined: dict[tuple[str, ...], _Joined] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        """How many, and of what: not the numbers, of which there are as many as in all activations."""
        return f"<gradients of {self.samples} samples for {len(self.like)} parameters>"

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(self.like)

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters that received no gradient from this batch."""
        return tuple(name for name in self.like if not self.records.get(name))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operations without a fast path that went through vmap, with their parameters."""
        return tuple(sorted({f"{s.operation}({', '.join(s.parameters)})" for s in self.sites if s.fallback}))

    def __rmul__(self, factors: Tensor | float) -> SampleGradients:
        """c_i v_i for a factor per sample, or one for all."""
        c = self._factors(factors)
        return self._with({name: tuple(r.scaled(c) for r in rs) for name, rs in self.records.items()})

    def __add__(self, other: SampleGradients) -> SampleGradients:
        """v_i + u_i."""
        return self.plus(other)

    def plus(self, *others: SampleGradients) -> SampleGradients:
        """v_i + u_i + …: several at once, since each addition copies what was added before."""
        for other in others:
            if other.samples != self.samples or other.names != self.names:
                raise InputError(
                    f"only gradients of the same samples and parameters add up: expected {self.samples} samples, "
                    f"got {other.samples}"
                )
        own = {name: [r for g in (self, *others) for r in g.records.get(name, ())] for name in self.like}
        return self._with({name: joined(records) for name, records in own.items() if records})

    def merged(self, size: int) -> SampleGradients:
        """Each ``size`` consecutive samples become one unit with the sum of their gradients."""
        if size < 1 or self.samples % size:
            raise InputError(f"units of {size} samples need a multiple of that many samples, got {self.samples}")
        merged = {name: joined([r.merged(size) for r in rs]) for name, rs in self.records.items()}
        return SampleGradients(merged, self.like, self.samples // size, None, self.sites)

    def masked(self, keep: Tensor) -> SampleGradients:
        """v_i where ``keep`` [sample], exact zeros elsewhere, even where v_i is not finite."""
        return self._with({name: tuple(r.masked(keep) for r in rs) for name, rs in self.records.items()})

    def norms(self, groups: Groups | None = None) -> Tensor:
        """‖v_i‖ over all parameters, [sample]; or over each group's, [sample, group]."""
        with self._precisely():
            if groups is None:
                return self._sq_norms(self.names).sqrt()
            return torch.stack([self._sq_norms(group) for group in groups], 1).sqrt()

    def weighed(self, rule: FromNorms, groups: Groups) -> Weighed:
        """The norms, and what a rule makes of them."""
        norms = self.norms(groups)
        weights, finite = rule(norms, torch.ones(self.samples, dtype=torch.bool, device=norms.device))
        lost = soon((~finite).sum())
        return Weighed(norms, weights, lost, lambda: not lost())

    def inner(self, direction: Gradient) -> Tensor:
        """⟨v_i, u⟩ for a direction with a tensor for each parameter. [sample]."""
        with self._precisely():
            parts = [r.inner(direction[name]) for name, records in self.records.items() for r in records]
        return torch.stack(parts).sum(0) if parts else self._zeros()

    def weighted_sum(self, weights: Tensor, groups: Groups | None = None) -> Gradient:
        """Σ_i w_i v_i for weights [sample], or [sample, group] where each group has its own."""
        shape = [self.samples] if groups is None else [self.samples, len(groups)]
        if list(weights.shape) != shape:  # a shorter one would be repeated, and its sum be another
            raise InputError(f"expected a weight for each sample, of shape {shape}, got {list(weights.shape)}")
        columns = [(self.names, weights)] if groups is None else [(g, weights[:, k]) for k, g in enumerate(groups)]
        with self._precisely():
            return {name: value for names, column in columns for name, value in self._sums(names, column)}

    def _sums(self, names: Sequence[str], weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        together = self._together(names, weights)
        own = {name: self._own(name) for name in names if name not in together}
        found = iter(totals([record for records in own.values() for record in records], weights))
        for name in names:
            parts = [together[name]] if name in together else [next(found) for _ in own[name]]
            if not parts:
                parts = [torch.zeros_like(self.like[name], dtype=self._dtype)]
            yield name, sum(parts[1:], parts[0])

    def _together(self, names: Sequence[str], weights: Tensor) -> Gradient:
        """On a GPU, the sums of all parameters that are too small for a launch each, by one product."""
        sizes, rows = self._small(names)
        if rows is None:
            return {}
        totals = (weights.to(rows.dtype) @ rows).split(list(sizes.values()))
        return {name: total.view(self.like[name].shape) for name, total in zip(sizes, totals, strict=True)}

    def _small(self, names: Sequence[str]) -> _Joined:
        """On a GPU, the written gradients of small parameters, where they are of one format.

        Put side by side once: norms and every weighted sum read the same rows.
        """
        key = tuple(names)
        if key not in self._joined:
            small: Gradient = {}
            for name in names:
                records = self.records.get(name, ())
                alone = records[0] if len(records) == 1 and self.like[name].numel() <= SMALL else None
                if isinstance(alone, Dense) and alone.value.is_cuda:
                    small[name] = wide(alone.value).reshape(self.samples, self.like[name].numel())
            same = len({value.dtype for value in small.values()}) == 1
            sizes = {name: own.shape[1] for name, own in small.items()} if same else {}
            self._joined[key] = sizes, torch.cat(list(small.values()), 1) if same else None
        return self._joined[key]

    def materialise(self) -> Gradient:
        """v_i written out: [sample, *shape] for each parameter."""
        out: Gradient = {}
        for name, like in self.like.items():
            dense = [r.dense() for r in self.records.get(name, ())]
            zeros = torch.zeros(self.samples, *like.shape, dtype=self._dtype, device=like.device)
            out[name] = sum(dense[1:], dense[0]) if dense else zeros
        return out

    def explain(self, *, measure: bool = False) -> str:
        """How each weight's norm was computed, and what it was chosen from; ``measure``: and how long it takes now."""
        head = f"{'parameter':40} {'operation':18} {'norm':9} {'gram':>12} {'written':>12}  multiplications a sample"
        lines = [head + ("; norm and sum, ms" if measure else "")]
        times = timed(self) if measure else {}
        for site in self.sites:
            costs = (f"{site.form.gram_cost:>12,} {site.form.written_cost:>12,}") if site.form else f"{'':25}"
            own = [times[name] for name in site.parameters if name in times]
            took = f" {sum(norm for norm, _ in own):9.3f} {sum(total for _, total in own):9.3f}" if own else ""
            tuned = _tuned(site.form) if site.form else ""
            names = ", ".join(site.parameters)
            lines.append(f"{names:40} {site.operation:18} {site.how:9} {costs}{took}{tuned}".rstrip())
        lines.append(EXPLAINED)
        return "\n".join(lines)

    def _sq_norms(self, names: Sequence[str]) -> Tensor:
        sizes, rows = self._small(names)
        own = [self._own(name) for name in names if name not in sizes]
        parts = [] if rows is None else [Dense(rows).sq_norm()]
        parts += sq_norms([record for records in own for record in records])
        if not parts:
            return self._zeros()
        # in float64: what adding many parts rounds away would be left where a tied weight's records cancel
        squares = torch.stack([part.double() for part in parts]).sum(0)
        tied = max(map(len, own), default=0)
        if tied > 1:  # ‖Σ u‖² = Σ ‖u‖² + 2 Σ ⟨u, v⟩; what may cancel is rounded like (Σ ‖u‖)² ≤ tied · Σ ‖u‖²
            crossed = [cross(u, v) for records in own for i, u in enumerate(records) for v in records[:i]]
            more = 4 * tied * max(torch.finfo(part.dtype).eps for part in (*parts, *crossed))
            # doubled after the cast: a product that overflows then meets a sum that does not
            squares = (1 + more) * squares + 2 * torch.stack([part.double() for part in crossed]).sum(0)
        return squares.to(self._dtype).clamp(min=0)

    def _own(self, name: str) -> tuple[Record, ...]:
        """A parameter's records as norms and sums take them."""
        records = self.records.get(name, ())
        return records if len(records) < 2 else tuple(beside(record) for record in records)

    def _precisely(self) -> torch.autocast:
        """Norms and sums are of the gradients as they are, whatever the caller lets his model compute in."""
        return full_precision(next(iter(self.like.values())))

    def _with(self, records: Mapping[str, tuple[Record, ...]]) -> SampleGradients:
        return SampleGradients(records, self.like, self.samples, self.losses, self.sites)

    def _factors(self, factors: Tensor | float) -> Tensor:
        dtype = None if isinstance(factors, Tensor) else self._dtype
        return torch.as_tensor(factors, dtype=dtype, device=next(iter(self.like.values())).device).expand(self.samples)

    @property
    def _dtype(self) -> torch.dtype:
        return widest(self.like.values())

    def _zeros(self) -> Tensor:
        like = next(iter(self.like.values()))
        return torch.zeros(self.samples, dtype=self._dtype, device=like.device)


def _tuned(form: Form) -> str:
    """The milliseconds from which a form was chosen, where they were measured."""
    times = ", ".join(f"{name} {time:.3f}" for name, time in form.milliseconds.items())
    return f"  {times} ms for {form.trial} samples" if times else ""


def widest(values: Iterable[Tensor]) -> torch.dtype:
    """The format that holds all of these, and float32."""
    return functools.reduce(torch.promote_types, {value.dtype for value in values}, torch.float32)


def from_dense(gradients: Gradient, like: Mapping[str, Tensor]) -> SampleGradients:
    """SampleGradients from per-sample gradients that are written out, [sample, *shape]."""
    samples = next(iter(gradients.values())).shape[0]
    return SampleGradients({name: (Dense(v),) for name, v in gradients.items()}, dict(like), samples)


def soon(number: Tensor) -> Callable[[], int]:
    """A number that a GPU may still be computing: asked for later, it waits for nothing that was launched since."""
    if not number.is_cuda:
        return lambda: int(number)
    here = torch.empty(number.shape, dtype=number.dtype, device="cpu", pin_memory=True)
    here.copy_(number, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(number.device))  # not of the device that happens to be current

    def wait() -> int:
        there.synchronize()
        return int(here)

    return wait
