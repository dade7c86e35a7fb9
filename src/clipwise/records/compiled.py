"""The same per-sample gradients through compiled graphs of one fixed size.

Receives: a model, a loss, and batches of at most ``rows`` samples, which are padded to that size; larger ones are
computed without a graph.
Gives: SampleGradients whose norms and weighted sums come from two graphs: forward, backward and norms in the first, the
weighted sum in the second. Between them a method weighs norms as it likes. Where it takes gradients is part of the
first graph if it is the same at every step (``of``): all of its passes, and what it makes of them.

On CUDA both graphs are captured as CUDA graphs and replayed, and so are the weights where a method stays the same, so a
step costs few launches. The results of a chunk are overwritten by the next one: use them before asking for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.records.capture import Capture, Loss, batch_size, graph_of, traced_call, trainable
from clipwise.records.gradients import FromNorms, Groups, SampleGradients, Weighed
from clipwise.records.kernels import zero_rows
from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds import Record, full_precision, summed, tensors_of, widened
from clipwise.records.lean import lean
from clipwise.records.replay import Replay, ready
from clipwise.records.states import HOOKS
from clipwise.records.tf32 import allowed
from clipwise.records.trees import mapped, tensors
from clipwise.records.weighing import Weights
from clipwise.types import Batch, Gradient, InputError, Refused

AGREE = 5e-2  # what fusing may change where a model computes in bfloat16, since it rounds in fewer places
ONE = 5 * AGREE  # and of one sample in a hundred: among thousands some are much shorter than others
SAME = 2e-3  # of norms, where they and the records are of the same numbers
SAME_NARROW = 1e-2  # where records are in half precision
Records = Mapping[str, tuple[Record, ...]]
_PLAIN = (bool, int, float, str)
_VALUES = (*_PLAIN, OrderedDict)  # of constants those that are compared by value, as hooks are, and not by identity
_Constant = tuple[Mapping[str, Any], str, Any]  # where it is kept, its name, and what it was


@dataclass(frozen=True)
class GraphGradients(SampleGradients):
    """SampleGradients with norms already there and the weighted sum compiled; anything else is the ordinary algebra."""

    groups: Groups = ()
    found: Tensor | None = field(default=None, repr=False)  # norms [sample, group]
    weigh: Callable[[FromNorms], Weighed] | None = field(default=None, repr=False)
    add_up: Callable[[Tensor], Gradient] | None = field(default=None, repr=False)

    def norms(self, groups: Groups | None = None) -> Tensor:
        """‖v_i‖ in each group, from the graph where it computed them."""
        if groups is not None and self.found is not None and _same(groups, self.groups):
            return self.found
        return super().norms(groups)

    def weighed(self, rule: FromNorms, groups: Groups) -> Weighed:
        """The norms, and what a rule makes of them: by a graph of its own where it is the same rule again."""
        if self.weigh is not None and _same(groups, self.groups):
            return self.weigh(rule)
        return super().weighed(rule, groups)

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
    _modules: list[nn.Module] = field(default_factory=list, repr=False)
    _kept: list[_Constant] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Remember the modules: to walk through a model takes longer than to look at a list."""
        self._modules = list(self.model.modules())
        self._capture = Capture(self.model, self.loss)

    def __call__(self, batch: Batch) -> SampleGradients:
        """The per-sample gradients of a batch; one of more than ``rows`` samples is computed eagerly."""
        return self.of(self._capture, None, batch)

    def of(
        self, run: Callable[..., SampleGradients], key: Hashable, batch: Batch, *beside: Any, each: int = 1
    ) -> SampleGradients:
        """What ``run(batch, *beside)`` makes of captured gradients: one for each sample of the batch.

        Whatever may differ from step to step must be a tensor of ``batch`` or ``beside``: the graph keeps the rest as
        it was the first time. The ``key`` says which run it is, ``each`` how many rows of the model a sample is.
        """
        samples, rows = batch_size(batch), max(1, self.rows // each)
        if not 0 < samples <= rows:  # a unit of several samples may be larger than a chunk, and chance says how large
            return run(batch, *beside)
        arguments = mapped(batch, lambda t: _padded(t, rows) if t.dim() else t), *beside
        place = (
            key,
            tuple((t.shape, t.dtype, t.stride()) for t in tensors(arguments)),
            tuple(module.training for module in self._modules),
            tuple(allowed(convolution=kind) for kind in (True, False)),
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        )
        if place not in self._graphs:
            self._graphs[place] = _Graphs(self.model, run, arguments, rows, self.groups, self.options)
            self._kept = self._kept or list(self._constants())
        return self._graphs[place](arguments, samples)

    def refuse_changed(self) -> None:
        """Refuse a model of which something is another than when it was compiled: its graphs keep that as it was."""
        for own, name, value in self._kept:
            now = own.get(name)
            if now is not value and (type(now) is not type(value) or type(value) not in _VALUES or now != value):
                raise InputError(
                    f"{name} of the model is another than when its step was compiled, which keeps it as it was: write "
                    f"new values into a parameter or a buffer, {name}.data.copy_(…), make a new run with "
                    "spent=private.ledger, or leave compile=True out"
                )

    def _constants(self) -> Iterator[_Constant]:
        """What a graph takes for constants; a mode has graphs of its own.

        Which modules, parameters, buffers and hooks there are, plain numbers, and functions, such as an activation or a
        ``forward`` in the place of the class's.
        """
        for own in map(vars, self._modules):
            yield from ((own, kind, own[kind].copy()) for kind in HOOKS)
            for kind in (own["_modules"], own["_parameters"], own["_buffers"]):
                yield from ((kind, name, value) for name, value in kind.items())
            for name, value in {"forward": None, **own}.items():
                if name != "training" and (type(value) in _PLAIN or callable(value) or name == "forward"):
                    yield own, name, value


def _padded(rows: Tensor, size: int) -> Tensor:
    """The rows, filled up with copies of the first, of weight zero: they count neither in the sum nor in accounting.

    Not with zeros: a model may have no finite gradient there, and zero times that is not zero. A copy that has none
    where the row itself has one, which takes dropout, is left out as a sample would be.
    """
    missing = size - rows.shape[0]
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


class _Graphs:
    """The two graphs of one run for one shape of batch."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[..., SampleGradients],
        arguments: tuple[Any, ...],
        rows: int,
        groups: Groups,
        options: dict[str, Any],
    ) -> None:
        self.groups, self.parameters, self.rows = groups, trainable(model), rows
        self._build: Callable[[Sequence[Tensor]], Records] | None = None
        self._sites: Any = ()

        def first(gradients: SampleGradients) -> Any:
            ready = {name: tuple(summed(r) for r in rs) for name, rs in gradients.records.items()}  # rounded once
            gradients = dataclasses.replace(gradients, records=ready)
            flat, self._build = _flattened(ready)
            self._sites = gradients.sites
            return gradients.norms(groups), gradients.losses, flat

        expected = run(*arguments).norms(groups)
        # recorded, a graph has inputs of its own, where every batch is copied: the caller's first one stays as it was
        own = mapped(arguments, lambda t: t.clone() if t.is_cuda else t)
        graph = traced_call(model, lambda *arguments: first(run(*arguments)), *own)
        values = {name: p.detach() for name, p in self.parameters.items()}
        if "backend" not in options:  # only torch's own compiler takes normalisations apart
            with full_precision(expected):  # traced again, with the casts that it has
                graph = lean(graph, values, *own)
        forward = ready(graph, (values, *own), options)
        norms, _, flat = forward(values, *arguments)

        def second(flat: list[Tensor], weights: Tensor) -> Gradient:
            assert self._build is not None
            sums = SampleGradients(self._build(flat), self.parameters, self.rows).weighted_sum(weights, groups)
            return {name: _laid_out(value, self.parameters[name]) for name, value in sums.items()}

        pool = getattr(forward, "pool", None)
        beside = (*model.parameters(), *model.buffers(), *_graph_tensors(graph), *tensors(own[1:]))
        self._weights = Weights(norms, pool, zero_rows(flat, self.rows, beside), options)
        inputs = flat, self._weights.every
        self._forward, self._sum = forward, ready(graph_of(second, *inputs), inputs, options, pool)
        try:
            self._check(expected, arguments)
        except Refused:
            if torch.allclose(run(*arguments).norms(groups), expected, rtol=1e-2, equal_nan=True):
                raise
            raise Refused(
                "the model draws at random while it trains (dropout), so that its compiled graph cannot be held "
                "against the eager pass; write compile=False, or let it draw nothing (p=0)"
            ) from None

    def _check(self, eager: Tensor, arguments: tuple[Any, ...]) -> None:
        """Refuse graphs whose norms or sums are not the eager pass's: a compiler's mistake can be a privacy failure."""
        assert self._build is not None
        self._weights.forget()  # what a graph does not write again is seen
        for _ in range(3):  # a race or a stale buffer may need more than one run to show
            norms, _, flat = self._forward(self._values(), *arguments)
            finite = eager.isfinite() & norms.isfinite()
            error = ((norms - eager) / eager.clamp(min=1e-6))[finite]
            if error.numel():
                _agree("norms", float(error.abs().quantile(0.99)), AGREE)
                _agree("norms of a sample", float(error.abs().max()), ONE)
                _agree("norms, on average,", abs(float(error.mean())), AGREE * (0.1 + error.numel() ** -0.5))
        # the norms of the very records that are summed: here nothing but the order of additions may differ
        records = SampleGradients(self._build(flat), self.parameters, self.rows)
        found = records.norms(self.groups)
        error = ((norms - found) / found.clamp(min=1e-6))[finite & found.isfinite()].abs()
        if error.numel():
            narrow = any(t.dtype in HALF for t in flat)
            _agree("norms and records", float(error.max()), SAME_NARROW if narrow else SAME)
        weights = torch.where(finite, 1 / norms.clamp(min=1e-6), 0.0)
        sums = self._sum(flat, weights)
        own = records.weighted_sum(weights, self.groups)
        length = math.sqrt(sum(float(v.double().square().sum()) for v in own.values()))
        apart = math.sqrt(sum(float((sums[n] - v).double().square().sum()) for n, v in own.items()))
        if math.isfinite(length):
            _agree("sums", apart / max(length, 1e-6), AGREE)

    def _values(self) -> Mapping[str, Tensor]:
        """The parameters as the first graph takes them: compiled, without gradients; recorded, in any way."""
        if isinstance(self._forward, Replay):
            return self.parameters
        return {name: p.detach() for name, p in self.parameters.items()}

    def __call__(self, arguments: tuple[Any, ...], samples: int) -> SampleGradients:
        assert self._build is not None
        # as they are now: a recurrent layer may have moved its weights to other memory since
        norms, losses, flat = self._forward(self._values(), *arguments)

        def add_up(weights: Tensor) -> Gradient:
            every = self._weights.padded(weights)
            # recorded, it reads what the first graph wrote: nothing to look for
            return self._sum.again() if isinstance(self._sum, Replay) else self._sum(flat, every)

        build = self._build
        return GraphGradients(
            # the ordinary algebra sees the real rows only, and seldom sees any
            _Later(lambda: {name: tuple(widened(_rows(r, samples)) for r in rs) for name, rs in build(flat).items()}),
            self.parameters,
            samples,
            None if losses is None else losses[:samples],
            self._sites,
            groups=self.groups,
            found=norms[:samples],
            weigh=functools.partial(self._weights, norms, samples),
            add_up=add_up,
        )


class _Later(Mapping[str, tuple[Record, ...]]):
    """Records that are put together when somebody looks at them: for a hundred layers that takes a while."""

    def __init__(self, make: Callable[[], Records]) -> None:
        self._make = functools.cache(make)

    def __getitem__(self, name: str) -> tuple[Record, ...]:
        return self._make()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def _graph_tensors(graph: Callable[..., Any]) -> list[Tensor]:
    """Tensors that a traced graph holds: a model's masks, say."""
    modules = graph.modules() if isinstance(graph, nn.Module) else ()
    held = [value for m in modules for value in (*m.parameters(False), *m.buffers(False), *vars(m).values())]
    return [value for value in held if isinstance(value, Tensor)]


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """The same numbers with the strides of a parameter: then an optimizer can update all parameters at once."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _agree(what: str, error: float, most: float) -> None:
    if not error <= most:
        raise Refused(
            f"the compiled graph's {what} differ from the eager pass's by {error:.1e} of their size, expected at most "
            f"{most:.0e}; write compile=False"
        )


def _rows(record: Record, samples: int) -> Record:
    return dataclasses.replace(record, **{name: t[:samples] for name, t in tensors_of(record).items()})  # type: ignore[type-var]


def _flattened(records: Records) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Records]]:
    """The tensors of all records, and the function that puts tensors in their places again."""
    flat = [t for own in records.values() for record in own for t in tensors_of(record).values()]

    def build(values: Sequence[Tensor]) -> Records:
        rest = iter(values)
        return {
            name: tuple(
                dataclasses.replace(record, **{key: next(rest) for key in tensors_of(record)})  # type: ignore[type-var]
                for record in own
            )
            for name, own in records.items()
        }

    return flat, build
