"""What a forward pass writes down: where parameters meet data, and the taps whose gradients tell the rest.

Receives: calls in which a parameter, or something made of parameters alone, meets samples.
Gives: after one backward pass through the taps, the Records of every parameter.

A tap is an extra input that the forward ignores and whose gradient the backward returns: the gradient b at a layer's
output, or the per-sample gradient itself where writing it out at once is cheaper. No weight gradient is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clipwise.records import forms
from clipwise.records.displacement import Own, cut, dual_dense
from clipwise.records.kinds import Dense, Indexed, Record
from clipwise.types import InputError


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
    pull: Callable[[Tensor], Mapping[str, Tensor]] | None = None  # V → Jᵀ V for each parameter, where it is known
    own: Own | None = None  # in a displaced pass: what each unit has in its place; of a transpose, not transposed

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
    overwritten: bool = False  # the model writes into its outputs afterwards, as nn.ReLU(inplace=True) does

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
    spare: int = 0  # zeros behind the features of the output's gradient, for the rule and what comes before alike


@dataclass(frozen=True)
class Site:
    """A place where a parameter met data, for ``explain()``."""

    parameters: tuple[str, ...]
    operation: str
    form: forms.Form | None  # None: the per-sample gradient falls out of the backward pass
    fallback: bool = False

    @property
    def how(self) -> str:
        """How the norm of the parameters' gradients is computed, in a word (``gradients.EXPLAINED``)."""
        return "vmap" if self.fallback else "backward" if self.form is None else self.form.name


_Rule: TypeAlias = tuple[Callable[..., Tensor], int]  # a Want's rule and spare


class _Tap(torch.autograd.Function):
    """The output, unchanged; in the backward pass each tap receives what its rule makes of the output's gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rules: Sequence[_Rule], inputs: int, *rest: Tensor) -> Tensor:
        ctx.rules, ctx.inputs = rules, inputs
        ctx.save_for_backward(*rest[:inputs])
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        taps = list[Tensor]()
        for rule, spare in ctx.rules:
            padded = torch.nn.functional.pad(gradient, (0, spare)) if spare else gradient
            taps.append(rule(padded, *ctx.saved_tensors))
            gradient = padded[..., : gradient.shape[-1]] if spare else gradient
        return (gradient, None, None, *(None,) * ctx.inputs, *taps)


@dataclass
class Tape:
    """The taps of one forward pass, and what their gradients become."""

    samples: int
    owns: Mapping[str, Own] = field(default_factory=dict)  # of displaced parameters, by name
    dual: bool = False  # the pass carries forward-mode derivatives, which only ordinary operations pass on
    leaves: list[Tensor] = field(default_factory=list)
    wants: list[tuple[Source, Callable[[Tensor], Record]]] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    zeros: dict[Any, Tensor] = field(default_factory=dict)  # one for all taps of a format: on a GPU each is a launch

    def tap(self, output: Tensor, inputs: Sequence[Tensor], wants: Sequence[Want]) -> Tensor:
        """The output with taps attached; ``inputs`` are what the rules read."""
        detached = [cut(t) for t in inputs]
        if self.dual:
            zero = output.new_zeros(()).expand_as(output).requires_grad_()
            for want in wants:
                self.leaf(zero, want.source, lambda b, want=want: want.finish(want.rule(b, *detached)))  # type: ignore[misc]
            return output + zero
        taps = [self._zero(output, w.dtype).expand(tuple(w.shape)).requires_grad_() for w in wants]
        for tap, want in zip(taps, wants, strict=True):
            self.leaf(tap, want.source, want.finish)
        rules = tuple((w.rule, w.spare) for w in wants)
        tapped: Tensor = _Tap.apply(output, rules, len(inputs), *detached, *taps)  # type: ignore[no-untyped-call]
        return tapped

    def _zero(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        key = dtype, like.device
        if key not in self.zeros:
            self.zeros[key] = like.new_zeros((), dtype=dtype)
        return self.zeros[key]

    def leaf(self, tensor: Tensor, source: Source, finish: Callable[[Tensor], Record]) -> Tensor:
        """A tensor whose gradient becomes a record of ``source``."""
        self.leaves.append(tensor)
        self.wants.append((source, finish))
        return tensor

    def writes(self, form: forms.Form, source: Source) -> bool:
        """Whether a product's gradient is written out at once; with derivatives the pair is kept, being bilinear."""
        return not self.dual and (form.name == "written" or source.name is None)

    def site(self, sources: Sequence[Source], operation: str, form: forms.Form | None, fallback: bool = False) -> None:
        """Note a place for ``explain()``."""
        names = tuple(sorted({name for source in sources for name in source.names}))
        self.sites.append(Site(names, operation, form, fallback))

    def finish(self, losses: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, list[Record]]:
        """One backward pass; the records of every parameter that received a gradient."""
        records: dict[str, list[Record]] = {}
        if not self.leaves or not losses.requires_grad:
            return records
        try:
            gradients = torch.autograd.grad(losses.sum(), self.leaves, allow_unused=True, create_graph=self.dual)
        except RuntimeError as error:
            if "torch.utils.checkpoint" not in str(error):
                raise
            raise InputError(
                "expected layers that are computed once, got gradient checkpointing, which computes them again in the "
                "backward pass, where they cannot be followed: turn it off (Hugging Face: "
                "model.gradient_checkpointing_disable()), and where memory is short write a smaller chunk=…"
            ) from error
        for (source, finish), gradient in zip(self.wants, gradients, strict=True):
            if gradient is None:
                continue
            for name, record in self._through(source, finish(gradient), parameters):
                records.setdefault(name, []).append(record)
        self.leaves.clear()  # what finishes a record may know the tape: a circle would keep activations alive
        self.wants.clear()
        return records

    def _through(
        self, source: Source, record: Record, parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Record]]:
        """A record of something made from parameters, as records of the parameters: v_i = Jᵀ V_i."""
        if source.name is not None:
            yield source.name, record
            return
        names = sorted(source.names)
        dense = dual_dense(record) if self.dual else record.dense()
        if source.lookup is not None:
            yield names[0], _looked_up(source.lookup, dense, parameters[names[0]].shape)
            return
        if source.pull is not None and source.own is None and not self.dual:
            yield from ((name, Dense(value)) for name, value in source.pull(dense).items())
            return
        pulled = (
            self._pulled_by_unit(source.own, names, dense)
            if source.own is not None
            else torch.autograd.grad(
                source.tensor,
                [parameters[name] for name in names],
                dense.to(source.tensor.dtype),
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
            )
        )
        for name, value in zip(names, pulled, strict=True):
            if value is not None:
                yield name, Dense(value)

    def _pulled_by_unit(self, own: Own, names: Sequence[str], gradient: Tensor) -> Iterator[Tensor | None]:
        """v_i = J_iᵀ V_i at each unit's own parameters: units do not touch each other, so one pull serves them all."""
        leaves = [self.owns[name].value for name in names]
        pull = functools.partial(
            torch.autograd.grad, own.value, leaves, retain_graph=True, create_graph=self.dual, allow_unused=True
        )
        gradient = gradient.to(own.value.dtype)
        if own.views == 1:
            yield from pull(gradient)
            return
        for value in pull(gradient.unflatten(0, (-1, own.views)).movedim(1, 0), is_grads_batched=True):
            yield None if value is None else value.movedim(0, 1).flatten(0, 1)


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


def by_unit(tensor: Tensor, rows: Rows, units: int) -> Tensor:
    """[unit, position, feature]: everything that belongs to a unit, whose samples follow each other."""
    return tensor.movedim(rows.dim, 0).reshape(units, -1, tensor.shape[-1])


def from_units(tensor: Tensor, rows: Rows, like: Sequence[int]) -> Tensor:
    """The inverse: of shape ``like``, whose last size may be another."""
    sizes = [*like[: rows.dim], *like[rows.dim + 1 : -1], tensor.shape[-1]]
    return tensor.reshape(like[rows.dim], *sizes).movedim(0, rows.dim)
