"""What a forward pass writes down: where parameters meet data, and the taps whose gradients tell the rest.

Receives: calls in which a parameter, or something made of parameters alone, meets samples.
Gives: after one backward pass through the taps, the Records of every parameter.

A tap is an extra input that the forward ignores and whose gradient the backward returns: the gradient b at a layer's
output, or the per-sample gradient itself where writing it out at once is cheaper. No weight gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clipwise.records import planner
from clipwise.records.kinds import Dense, Indexed, Record


@dataclass(frozen=True)
class Rows:
    """Where a tensor holds its samples: along ``dim``, ``factor`` consecutive entries for each."""

    dim: int
    factor: int


@dataclass(frozen=True)
class Lookup:
    """Rows of an embedding table that every sample sees alike (positions)."""

    ids: Tensor
    padding_idx: int | None


@dataclass(frozen=True)
class Source:
    """A tensor made of parameters alone: a parameter, or one computed from some (a standardised weight, a slice)."""

    tensor: Tensor
    names: frozenset[str]
    flipped: bool = False  # known to be the transpose of a parameter, which a product can undo
    lookup: Lookup | None = None  # known to be rows of a table, at positions that no sample chooses

    @property
    def name(self) -> str | None:
        """The parameter's name, if this is one as it stands or as its transpose."""
        return next(iter(self.names)) if self.flipped or self.tensor.is_leaf else None


@dataclass(frozen=True)
class Call:
    """One call that touches a parameter: where its tensors, in the order of its arguments, hold samples."""

    function: Callable[..., Any]
    arguments: tuple[Rows | None, ...]
    outputs: tuple[Rows | None, ...]

    @property
    def label(self) -> str:
        """The function's name, for messages."""
        return getattr(self.function, "__name__", str(self.function))


@dataclass(frozen=True)
class Want:
    """One tap: its gradient's shape, how the backward makes it, and the record it becomes."""

    source: Source
    shape: Sequence[int]
    dtype: torch.dtype
    rule: Callable[..., Tensor]  # (output gradient, *inputs) → the tap's gradient
    finish: Callable[[Tensor], Record]


@dataclass(frozen=True)
class Site:
    """A place where a parameter met data, for ``explain()``."""

    parameters: tuple[str, ...]
    operation: str
    form: planner.Form | None  # None: the per-sample gradient falls out of the backward pass
    fallback: bool = False


class _Tap(torch.autograd.Function):
    """The output, unchanged; in the backward pass each tap receives what its rule makes of the output's gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rules: Sequence[Callable[..., Tensor]], inputs: int, *rest: Tensor) -> Tensor:
        ctx.rules, ctx.inputs = rules, inputs
        ctx.save_for_backward(*rest[:inputs])
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        taps = (rule(gradient, *ctx.saved_tensors) for rule in ctx.rules)
        return (gradient, None, None, *(None,) * ctx.inputs, *taps)


@dataclass
class Tape:
    """The taps of one forward pass, and what their gradients become."""

    samples: int
    leaves: list[Tensor] = field(default_factory=list)
    wants: list[tuple[Source, Callable[[Tensor], Record]]] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def tap(self, output: Tensor, inputs: Sequence[Tensor], wants: Sequence[Want]) -> Tensor:
        """The output with taps attached; ``inputs`` are what the rules read."""
        taps = [output.new_zeros((), dtype=w.dtype).expand(tuple(w.shape)).requires_grad_() for w in wants]
        for tap, want in zip(taps, wants, strict=True):
            self.leaf(tap, want.source, want.finish)
        rules = tuple(w.rule for w in wants)
        detached = [t.detach() for t in inputs]
        tapped: Tensor = _Tap.apply(output, rules, len(inputs), *detached, *taps)  # type: ignore[no-untyped-call]
        return tapped

    def leaf(self, tensor: Tensor, source: Source, finish: Callable[[Tensor], Record]) -> Tensor:
        """A tensor whose gradient becomes a record of ``source``."""
        self.leaves.append(tensor)
        self.wants.append((source, finish))
        return tensor

    def site(
        self, sources: Sequence[Source], operation: str, form: planner.Form | None, fallback: bool = False
    ) -> None:
        """Note a place for ``explain()``."""
        names = tuple(sorted({name for source in sources for name in source.names}))
        self.sites.append(Site(names, operation, form, fallback))

    def finish(self, losses: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, list[Record]]:
        """One backward pass; the records of every parameter that received a gradient."""
        records: dict[str, list[Record]] = {}
        if not self.leaves or not losses.requires_grad:
            return records
        gradients = torch.autograd.grad(losses.sum(), self.leaves, allow_unused=True)
        for (source, finish), gradient in zip(self.wants, gradients, strict=True):
            if gradient is None:
                continue
            for name, record in self._through(source, finish(gradient), parameters):
                records.setdefault(name, []).append(record)
        return records

    def _through(
        self, source: Source, record: Record, parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Record]]:
        """A record of something made from parameters, as records of the parameters: v_i = Jᵀ V_i."""
        if source.name is not None:
            yield source.name, record
            return
        names = sorted(source.names)
        if source.lookup is not None:
            yield names[0], _looked_up(source.lookup, record.dense(), parameters[names[0]].shape)
            return
        pulled = torch.autograd.grad(
            source.tensor,
            [parameters[name] for name in names],
            record.dense().to(source.tensor.dtype),
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
        for name, value in zip(names, pulled, strict=True):
            if value is not None:
                yield name, Dense(value)


def _looked_up(lookup: Lookup, b: Tensor, table: torch.Size) -> Record:
    ids = lookup.ids.flatten()
    b = b.reshape(b.shape[0], -1, table[1])
    if lookup.padding_idx is not None:
        b = b * (ids != lookup.padding_idx % table[0])[:, None]
    return Indexed(ids.expand(b.shape[0], -1), b, table)


def by_sample(tensor: Tensor, rows: Rows, samples: int) -> Tensor:
    """[sample, …]: the sample dimension first; several entries of one sample follow in a dimension of their own."""
    moved = tensor.movedim(rows.dim, 0)
    return moved if rows.factor == 1 else moved.reshape(samples, rows.factor, *moved.shape[1:])


def tensors(*trees: object) -> Iterator[Tensor]:
    """Every tensor in arguments, in order; lists, tuples and dictionaries are looked into."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, (list, tuple)):
            yield from tensors(*tree)
        elif isinstance(tree, dict):
            yield from tensors(*tree.values())


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same arguments with each tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        parts = [mapped(part, function) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, dict):
        return {key: mapped(value, function) for key, value in tree.items()}
    return tree
