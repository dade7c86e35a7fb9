"""One call that a parameter takes part in, under way, and what its handlers share.

Receives: a call, with where its tensors hold samples, the sources among its arguments, and the tape to write on.
Gives: a Meeting, which every handler takes first; wants, formats and the message of a refusal for several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clipwise.records.displacement import Own
from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds import Dense, wide, wide_format
from clipwise.records.tape import Call, Rows, Source, Tape, Want
from clipwise.types import Refused


class Meeting:
    """One call under way: its tape, its sources, and where its tensors hold samples."""

    def __init__(
        self,
        tape: Tape,
        call: Call,
        sources: dict[int, Source],
        args: tuple[Any, ...],
        kwargs: Any,
        given: Sequence[Tensor],
    ) -> None:
        self.tape, self.call, self.args, self.kwargs = tape, call, args, kwargs
        self.given = given  # the tensors among the arguments
        self._sources = sources
        self._cast = list[Tensor]()
        self._rows = {id(t): rows for t, rows in zip(given, call.arguments, strict=True)}

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.tape.samples

    def source(self, value: object) -> Source | None:
        """The argument's source, if it is made of parameters."""
        found = self._sources.get(id(value))
        # only a matrix product can undo a transpose; elsewhere it is a tensor made from the parameter
        if found is None or not found.flipped:
            return found
        return replace(found, flipped=False, own=found.own.turned() if found.own is not None else None)

    def factor(self, value: object) -> Source | None:
        """The same for a matrix product, where a parameter's transpose is as good as the parameter."""
        return self._sources.get(id(value))

    def rows(self, value: Tensor) -> Rows | None:
        """Where an argument holds samples."""
        return self._rows[id(value)]

    @property
    def out(self) -> Rows:
        """Where the output holds samples."""
        rows = self.call.outputs[0] if self.call.outputs else None
        if rows is None:
            raise Refused(mixing(self.call.label))
        return rows

    def own(self, argument: object) -> Own | None:
        """What each unit has in the argument's place, in a displaced pass."""
        source = self.source(argument)
        return None if source is None else source.own

    @property
    def half(self) -> torch.dtype | None:
        """The half precision of displaced arguments, if they have one: a displacement would be rounded away in it."""
        return next((t.dtype for t in self.given if t.dtype in HALF and self.own(t) is not None), None)

    def each(self, argument: Tensor) -> Tensor:
        """What each sample has in a parameter's place, [sample, *shape]: its own, or the same without any copy."""
        own = self.own(argument)
        if own is not None:
            return own.each
        shared = argument.detach().expand(self.samples, *argument.shape)
        return shared if self.half is None else wide(shared)

    def narrowed(self, result: Tensor) -> Tensor:
        """What an operation gives in the format that it would have without displacement, computed in a wider one."""
        half = self.half
        others = (t.dtype for t in self.given if t.dim() and t.is_floating_point())
        return result if half is None or any(dtype != half for dtype in others) else result.to(half)

    def placed(self, values: Tensor, dimensions: int) -> Tensor:
        """Values [sample, *shape] broadcast to so many dimensions, with samples where the output holds them."""
        out, sizes = self.out, values.shape[1:]
        if out == Rows(0, 1) and len(sizes) < dimensions:
            ones = (1,) * (dimensions - 1 - len(sizes))
            return values.reshape(len(values), *ones, *sizes) if ones else values
        values = values.reshape(len(values), *(1,) * (dimensions - len(sizes)), *sizes).movedim(0, out.dim)
        spread = list(values.shape)  # [..., sample, 1, ...]
        spread[out.dim + 1] = out.factor
        return values.expand(spread).flatten(out.dim, out.dim + 1)

    def value(self, argument: Any) -> Any:
        """The argument as the operation sees it: parameters detached, so that no weight gradient is computed."""
        return argument.detach() if self.source(argument) is not None else argument

    def cast(self, argument: Tensor, dtype: torch.dtype) -> Tensor:
        """An argument as autocast would cast it inside the call: cast here, one copy serves the pass and the record."""
        if argument.dtype == dtype:
            return argument
        result = argument.to(dtype)
        self._rows[id(result)] = self._rows[id(argument)]
        self._cast.append(result)  # kept, so that no other tensor gets its id
        return result

    def tap(self, output: Tensor, inputs: Sequence[Tensor], wants: Sequence[Want | None]) -> Tensor:
        """The output with the taps that are wanted."""
        return self.tape.tap(output, inputs, [w for w in wants if w is not None])


def sources(m: Meeting) -> list[Source]:
    """The sources among a call's arguments."""
    return [s for t in m.given if (s := m.source(t)) is not None]


def mixing(operation: str) -> str:
    """The message for an operation after which samples cannot be told apart."""
    return (
        f"{operation} with a trainable parameter mixes the samples of a batch: expected an output with one part per "
        "sample, got one that all samples share; compute each sample's value on its own, or freeze the parameter"
    )


def added_to(source: Source | None, output: Tensor, rows: Rows, keep: Callable[[Tensor], Tensor]) -> Want | None:
    """A parameter that is added to the output: its per-sample gradient is b, summed over positions by ``keep``."""
    if source is None:
        return None
    shape = (-1, *source.tensor.shape)
    return Want(
        source,
        (output.shape[rows.dim] // rows.factor, *source.tensor.shape),
        wide_format(output.dtype),
        lambda b, *_: keep(b).reshape(shape),
        Dense,
    )


def identity(b: Tensor, *_: Tensor) -> Tensor:
    """A want that is the output's gradient itself."""
    return b


def seen_format(x: Tensor) -> torch.dtype:
    """The format in which a product of x is computed and comes out."""
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrow else x.dtype


def normal_format(x: Tensor) -> torch.dtype:
    """The format in which a layer or group normalisation of x is computed: on a GPU autocast widens it."""
    return wide_format(x.dtype) if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype
