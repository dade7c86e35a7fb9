"""What clipping does to a batch: norms, sampling noise and directions, and the bias of several methods side by side.

Receives: per-sample gradients and methods; for a Monitor also the engine of a run, every n steps.
Gives: Diagnosis, which says that it is not private and whether it was measured on private or on public proxy data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from clipwise.diagnostics.bias import NOT_PRIVATE, Effect, effects
from clipwise.diagnostics.finite import FiniteGradients, Mean, finite_part, layers_of
from clipwise.methods import Engine, Method, as_method
from clipwise.records import SampleGradients, batch_size
from clipwise.records.trees import tensors
from clipwise.types import Batch, InputError, one_of, whole

Data = Literal["private", "public", "evaluation"]
LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BUCKETS = 5  # of equally many samples, by norm
BARS = 30  # of the histogram of norms
NOTES = {
    "private": NOT_PRIVATE,
    "public": "not private for the samples measured, which are a public proxy: it costs the training data no privacy",
    "evaluation": "not private: measured on evaluation data, which no ε covers; it costs the training data no privacy",
}


@dataclass(frozen=True)
class Spread:
    """How the gradients of a batch spread, over all parameters or in one layer. Not private."""

    quantiles: Mapping[str, float]  # of ‖g_i‖ (paper 0, Fig. 1)
    mean_length: float  # ‖ĝ‖, the length of the averaged gradient (paper 0, Fig. 1)
    sampling_noise: float  # (1/n) Σ ‖ĝ − g_i‖² (paper 0, Definition 2.5, with this batch as the data)


@dataclass(frozen=True)
class Bucket:
    """Samples of similar norm, and the mean cosine of their gradients with ĝ (paper 4, Fig. 1). Not private."""

    low: float  # smallest norm
    high: float  # largest norm
    samples: int
    cosine: float  # a gradient of zero has cosine 0


@dataclass(frozen=True)
class Diagnosis:
    """One look at a batch's gradients through several methods. Not private."""

    data: Data
    samples: int
    non_finite: int  # samples whose gradient was not finite: they are in ``samples`` and in nothing else
    spread: Spread
    layers: Mapping[str, Spread]
    buckets: tuple[Bucket, ...]
    norm_edges: tuple[float, ...]  # of the histogram of norms above zero, evenly spaced in their logarithm
    norm_counts: tuple[int, ...]
    methods: Mapping[str, Effect]  # by the method's expression, in the order given
    step: int | None = None
    seconds: float | None = field(default=None, compare=False)  # what this look cost
    not_private: Literal[True] = True

    @property
    def note(self) -> str:
        """Whom this may be shown to."""
        return NOTES[self.data]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        methods = {name: found.as_dict() for name, found in self.methods.items()}
        return {"not_private": True, "note": self.note, **asdict(self), "methods": methods}

    def text(self) -> str:
        """A few lines for people."""
        when = "" if self.step is None else f"after step {self.step}: "
        lost = f", {self.non_finite} without a finite gradient" if self.non_finite else ""
        if self.non_finite == self.samples:
            return f"{when}{self.samples} {self.data} samples{lost}: there is nothing to say of them; {self.note}\n"
        quantiles = ", ".join(f"{level} {value:.3g}" for level, value in self.spread.quantiles.items())
        cosines = ", ".join(f"{b.low:.3g}–{b.high:.3g}: {b.cosine:+.2f}" for b in self.buckets)
        lines = [
            f"{when}{self.samples} {self.data} samples{lost}; {self.note}",
            f"  norms           {quantiles}",
            f"  mean gradient   length {self.spread.mean_length:.3g}",
            f"  sampling noise  {self.spread.sampling_noise:.3g}",
            f"  cosine with the mean, by norm  {cosines}",
        ]
        width = max([len("method"), *map(len, self.methods)])
        titles = ("off direction", "along", "bias", "clipped", "signal/noise", "alignment")
        lines.append(f"  {'method':{width}}  " + "  ".join(f"{title:>13}" for title in titles))
        for name, found in self.methods.items():
            bias = found.whole
            values = (
                f"{bias.direction_error:.1%}",
                f"{bias.along:.3g}",
                f"{bias.magnitude:.3g}",
                f"{bias.clipped:.0%}",
                *("—" if x is None else f"{x:.3g}" for x in (bias.signal_to_noise, bias.alignment)),
            )
            unseen = f"  without its {found.unseen}" if found.unseen else ""
            lines.append(f"  {name:{width}}  " + "  ".join(f"{value:>13}" for value in values) + unseen)
        return "\n".join(lines) + "\n"


def measure(
    gradients: SampleGradients,
    methods: Method | str | Sequence[Method | str],
    *,
    data: Data = "private",
    taken: Mapping[str, SampleGradients] | None = None,
    noise_multiplier: float | None = None,
    expected_batch: float | None = None,
    step: int | None = None,
) -> Diagnosis:
    """Everything about one batch's gradients at θ, and what each method would do with them.

    ``methods`` is one or several: methods, or expressions such as "psac(clip_norm=0.5)".
    A method whose probe takes gradients elsewhere (BAM, inner momentum, views) needs them in ``taken``, by its
    expression; its bias is still that of an estimate of the mean at θ. Methods that average p samples get p consecutive
    ones. ``noise_multiplier`` and ``expected_batch`` add the noise of a release.

    Guarantees: at most a few samples' gradients of one parameter are written out at a time; nothing here reaches a
    ledger, a statement or a model.
    Edge cases: an empty batch is an error; samples without a finite gradient are counted and left out.
    """
    one_of("data", data, NOTES)
    chosen = [as_method(each) for each in ([methods] if isinstance(methods, Method | str) else methods)]
    looked = finite_part(gradients)
    true = looked.mean()
    release = {"noise_multiplier": noise_multiplier, "expected_batch": expected_batch}
    here = {str(method): method for method in chosen if method.probe is None and method.unit == 1}
    together, inner = effects(looked, list(here.values()), true, **release)
    found = dict(zip(here, together, strict=True))
    for method in chosen:
        if str(method) not in here:
            own = _weighed(looked, method, (taken or {}).get(str(method)))
            (found[str(method)],), _ = effects(own, [method], true, **release)
    edges, counts = _histogram(looked.kept(looked.squares.sum(1)).sqrt())
    layers = layers_of(gradients.names)
    whole, *spreads = _spreads(looked, true, [gradients.names, *layers.values()])
    return Diagnosis(
        data=data,
        samples=gradients.samples,
        non_finite=int((~looked.finite).sum()),
        spread=whole,
        layers=dict(zip(layers, spreads, strict=True)),
        buckets=_buckets(looked, true, inner),
        norm_edges=edges,
        norm_counts=counts,
        methods={str(method): found[str(method)] for method in chosen},
        step=step,
    )


@dataclass(frozen=True)
class Monitor:
    """What to look at, through which methods, and how often: a training loop asks ``due`` and then ``look``s.

    ``rows`` are the samples that are looked at, the same at every look, so that looks compare: a public proxy, or some
    of the private data; ``data`` says which.
    """

    rows: Batch
    data: Data
    methods: tuple[Method | str, ...] = ()  # beside the run's own
    every: int = 50

    def __post_init__(self) -> None:
        """Refuse what no look could be made with."""
        one_of("data", self.data, NOTES)
        whole("every", self.every)
        if not batch_size(self.rows):
            raise InputError("a monitor needs at least one row to look at, got none; write rows=(inputs, labels)")

    def due(self, step: int) -> bool:
        """Whether a look is due when this many steps were taken."""
        return step % self.every == 0

    def look(
        self,
        engine: Engine,
        method: Method,
        *,
        step: int,
        noise_multiplier: float | None = None,
        expected_batch: float | None = None,
    ) -> Diagnosis:
        """The diagnosis at the engine's point; ``method``, the run's own, comes first in it.

        Guarantees: the model's random draws (dropout) after a look are what they would have been without it.
        The engine must give gradients that stay: not those of a compiled graph, which its next call overwrites.
        """
        began = time.perf_counter()
        chosen = list({str(each): each for each in (method, *map(as_method, self.methods))}.values())
        with torch.random.fork_rng(devices={t.device for t in tensors(self.rows) if t.is_cuda}):
            gradients = engine.gradients(self.rows)
            taken = {str(m): m.gradients(engine, self.rows) for m in chosen if m.probe is not None}
            found = measure(
                gradients,
                chosen,
                data=self.data,
                taken=taken,
                noise_multiplier=noise_multiplier,
                expected_batch=expected_batch,
                step=step,
            )
        return replace(found, seconds=time.perf_counter() - began)


def _weighed(looked: FiniteGradients, method: Method, taken: SampleGradients | None) -> FiniteGradients:
    """What a method weighs, if not each gradient at θ: those of its own probe, averaged over the samples of a unit."""
    if method.probe is not None and taken is None:
        raise InputError(
            f"{method.name} takes its gradients elsewhere than at θ, and they were not given; "
            "write taken={str(method): method.gradients(engine, rows)}"
        )
    own = looked.gradients if taken is None else taken
    return finite_part((1 / method.unit) * own.merged(method.unit) if method.unit > 1 else own)


def _spreads(looked: FiniteGradients, true: Mean, parts: Sequence[Sequence[str]]) -> list[Spread]:
    """One for each part of the parameters."""
    squares = looked.kept(looked.sq_norms(parts))
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=squares.device)
    columns = torch.cat([squares.sqrt().quantile(levels, 0), squares.mean(0, keepdim=True)]).T.tolist()
    found = []
    for names, (*values, square) in zip(parts, columns, strict=True):
        quantiles = {f"{level:.0%}": value for level, value in zip(LEVELS, values, strict=True)}
        length = true.sq_norm(names)
        # Σ ‖ĝ − g_i‖²/n = Σ ‖g_i‖²/n − ‖ĝ‖²
        found.append(Spread(quantiles, mean_length=math.sqrt(length), sampling_noise=max(0.0, square - length)))
    return found


def _buckets(looked: FiniteGradients, true: Mean, inner: Tensor) -> tuple[Bucket, ...]:
    norms = looked.kept(looked.squares.sum(1)).sqrt()
    length = math.sqrt(true.sq_norm(looked.gradients.names))
    # cos(g_i, ĝ) = ⟨g_i, ĝ⟩/(‖g_i‖ ‖ĝ‖)
    cosines = torch.where(norms * length > 0, looked.kept(inner) / (norms * length), 0.0)
    order = norms.argsort()
    parts = [part for part in order.tensor_split(BUCKETS) if len(part)]
    return tuple(
        Bucket(float(norms[part[0]]), float(norms[part[-1]]), len(part), float(cosines[part].mean())) for part in parts
    )


def _histogram(norms: Tensor) -> tuple[tuple[float, ...], tuple[int, ...]]:
    norms = norms[norms > 0]
    if not len(norms):
        return (), ()
    logs = norms.log10().cpu()
    counts, edges = torch.histogram(logs, bins=BARS)
    return tuple((10**edges).tolist()), tuple(counts.long().tolist())
