"""The same per-sample gradients through compiled graphs of one fixed size.

Receives: a model, a loss, and batches of at most ``rows`` samples, which are padded to that size.
Gives: SampleGradients whose norms and weighted sums come from two graphs: forward, backward and norms in the first, the
weighted sum in the second. Between them a method weighs norms as it likes, so no method is part of a graph.

On CUDA both graphs are captured as CUDA graphs and replayed, so a step costs no launches. The results of a chunk are
overwritten by the next one: use them before asking for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.records.capture import Capture, Loss, batch_size, graph_of, traced, trainable
from clipwise.records.gradients import Groups, SampleGradients
from clipwise.records.kinds import Record
from clipwise.records.tape import mapped, tensors
from clipwise.types import Batch, Gradient, InputError, Refused

AGREE = 2e-2  # what fusing may change where a model computes in bfloat16
Records = Mapping[str, tuple[Record, ...]]


@dataclass(frozen=True)
class GraphGradients(SampleGradients):
    """SampleGradients with norms already there and the weighted sum compiled; anything else is the ordinary algebra."""

    groups: Groups = ()
    found: Tensor | None = field(default=None, repr=False)  # norms [sample, group]
    add_up: Callable[[Tensor], Gradient] | None = field(default=None, repr=False)

    def norms(self, groups: Groups | None = None) -> Tensor:
        """‖v_i‖ in each group, from the graph where it computed them."""
        if groups is not None and self.found is not None and _same(groups, self.groups):
            return self.found
        return super().norms(groups)

    def weighted_sum(self, weights: Tensor, groups: Groups | None = None) -> Gradient:
        """Σ_i w_i v_i, by the graph where the groups are its own."""
        if groups is not None and self.add_up is not None and _same(groups, self.groups):
            return self.add_up(weights)
        return super().weighted_sum(weights, groups)


def _same(one: Groups, other: Groups) -> bool:
    return [tuple(group) for group in one] == [tuple(group) for group in other]


@dataclass
class CompiledCapture:
    """Capture for a fixed number of rows and fixed groups."""

    model: nn.Module
    loss: Loss
    rows: int
    groups: Groups
    options: dict[str, Any] = field(default_factory=dict)  # for torch.compile
    _graphs: dict[Any, _Graphs] = field(default_factory=dict, repr=False)

    def __call__(self, batch: Batch) -> SampleGradients:
        """The per-sample gradients of a batch of at most ``rows`` samples."""
        samples = batch_size(batch)
        if samples > self.rows:
            raise InputError(f"expected at most {self.rows} rows, got {samples}")
        if samples == 0:
            return Capture(self.model, self.loss)(batch)
        padded = mapped(batch, lambda t: _padded(t, self.rows) if t.dim() else t)
        key = (
            tuple((t.shape, t.dtype, t.stride()) for t in tensors(padded)),
            tuple(module.training for module in self.model.modules()),
        )
        if key not in self._graphs:
            self._graphs[key] = _Graphs(self.model, self.loss, padded, self.groups, self.options)
        return self._graphs[key](padded, samples)


def _padded(rows: Tensor, size: int) -> Tensor:
    """Zeros to the end: their weight is zero, so they cost nothing in the sum and nothing in accounting."""
    if rows.shape[0] == size:
        return rows
    out = rows.new_zeros(size, *rows.shape[1:])
    out[: rows.shape[0]] = rows
    return out


class _Graphs:
    """The two graphs for one shape of batch."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch, groups: Groups, options: dict[str, Any]) -> None:
        self.groups, self.parameters = groups, trainable(model)
        self.rows = batch_size(batch)
        self._build: Callable[[Sequence[Tensor]], Records] | None = None
        self._sites: Any = ()

        def first(gradients: SampleGradients) -> Any:
            flat, self._build = _flattened(gradients.records)
            self._sites = gradients.sites
            return gradients.norms(groups), gradients.losses, flat

        graph = traced(model, loss, batch, first)
        values = {name: p.detach() for name, p in self.parameters.items()}
        forward = _ready(graph, (values, batch), options)
        norms, _, flat = forward(values, batch)

        def second(flat: list[Tensor], weights: Tensor) -> Gradient:
            assert self._build is not None
            records = self._build(flat)
            return SampleGradients(records, self.parameters, self.rows).weighted_sum(weights, groups)

        weights = torch.zeros_like(norms)
        backward = _ready(
            graph_of(second, flat, weights), (flat, weights), options, pool=getattr(forward, "pool", None)
        )
        self._forward, self._sum = forward, backward
        self._check(Capture(model, loss)(batch).norms(groups), batch)

    def _check(self, eager: Tensor, batch: Batch) -> None:
        """Refuse graphs whose norms are not the eager pass's: a compiler's mistake here would be a privacy failure."""
        for _ in range(3):  # a race or a stale buffer may need more than one run to show
            norms = self._forward({name: p.detach() for name, p in self.parameters.items()}, batch)[0]
            finite = eager.isfinite() & norms.isfinite()
            error = ((norms - eager).abs() / eager.clamp(min=1e-6))[finite]
            if error.numel() and float(error.max()) > AGREE:
                raise Refused(
                    f"the compiled graph's norms differ from the eager pass's by up to {float(error.max()):.1e} of "
                    f"their size, expected at most {AGREE:.0e}; write compile=False"
                )

    def __call__(self, batch: Batch, samples: int) -> SampleGradients:
        assert self._build is not None
        # as they are now: a recurrent layer may have moved its weights to other memory since
        values = {name: p.detach() for name, p in self.parameters.items()}
        norms, losses, flat = self._forward(values, batch)

        def add_up(weights: Tensor) -> Gradient:
            every = torch.zeros_like(norms)
            every[:samples] = weights
            return self._sum(flat, every)

        # the ordinary algebra sees the real rows only
        records = {name: tuple(_rows(r, samples) for r in rs) for name, rs in self._build(flat).items()}
        return GraphGradients(
            records,
            self.parameters,
            samples,
            losses[:samples],
            self._sites,
            groups=self.groups,
            found=norms[:samples],
            add_up=add_up,
        )


def _rows(record: Record, samples: int) -> Record:
    own = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}  # type: ignore[arg-type]
    return dataclasses.replace(record, **{k: v[:samples] for k, v in own.items() if isinstance(v, Tensor)})  # type: ignore[type-var]


def _flattened(records: Records) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Records]]:
    """The tensors of all records, and the function that puts tensors in their places again."""
    flat: list[Tensor] = []
    places: dict[str, list[tuple[Record, dict[str, int]]]] = {}
    for name, own in records.items():
        for record in own:
            where: dict[str, int] = {}
            for item in dataclasses.fields(record):  # type: ignore[arg-type]
                value = getattr(record, item.name)
                if isinstance(value, Tensor):
                    where[item.name] = len(flat)
                    flat.append(value)
            places.setdefault(name, []).append((record, where))

    def build(values: Sequence[Tensor]) -> Records:
        return {
            name: tuple(
                dataclasses.replace(record, **{key: values[i] for key, i in where.items()})  # type: ignore[type-var]
                for record, where in own
            )
            for name, own in places.items()
        }

    return flat, build


def _ready(graph: Callable[..., Any], example: tuple[Any, ...], options: dict[str, Any], pool: Any = None) -> Any:
    """The graph compiled; on CUDA also captured, with the example's tensors as its fixed inputs."""
    with torch.no_grad():
        compiled = torch.compile(graph, fullgraph=True, dynamic=False, **options)
        run = _quietly(compiled)
        run(*example)
        if any(t.is_cuda for t in tensors(example)):
            return _Replay(run, example, pool)
        return run


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with torch.no_grad():  # the graph holds its own backward pass
            return function(*arguments)

    return run


class _Replay:
    """A CUDA graph of a function; inputs are copied into the tensors that it was captured with."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], pool: Any) -> None:
        self.inputs = list(tensors(inputs))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = function(*inputs)
        self.pool = self.graph.pool()

    def __call__(self, *arguments: Any) -> Any:
        for mine, given in zip(self.inputs, tensors(arguments), strict=True):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
        self.graph.replay()
        return self.outputs
