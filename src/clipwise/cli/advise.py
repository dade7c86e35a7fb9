"""``clipwise advise``: which method and clip norm to begin with, and why.

Receives: AdviseConfig: the private data's name and the planned privacy, and public data to look at in their place.
Gives: a method with its clip norm, the reason and the plot: advice.html and advice.json.

Private gradients are read only where ``--spend`` says how much ε that may cost: then a noisy histogram of their norms
is released, which the ledger in the folder records. Otherwise all gradients are those of a proxy: public data, or
random inputs.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from clipwise import accounting, methods
from clipwise.accounting import Ledger, spent
from clipwise.accounting.calibration import least_noise
from clipwise.cli.options import words
from clipwise.cli.runs import (
    loss_of,
    network,
    new_folder,
    resolved,
    short,
    spent_before,
    splits_for,
    steps_of,
    use_threads,
)
from clipwise.cli.screen import rendered
from clipwise.config import AdviseConfig, TrainConfig
from clipwise.data import Arrays, Splits
from clipwise.diagnostics import Diagnosis, measure
from clipwise.methods import Method
from clipwise.noise import release
from clipwise.randomness import SecureStream, SeededStream
from clipwise.records import Loss, per_sample
from clipwise.report.figures import Axis, Bars, Figure, Line, Mark, Panel, Rule
from clipwise.report.folder import LEDGER, refuse_used, write
from clipwise.report.page import TOGGLE, document, figure_html, plain
from clipwise.report.plots import plotted
from clipwise.sampling import chunks
from clipwise.types import Gaussian, InputError, Part, PoissonGaussian, PrivateSum, positive, whole

FAMILIES = ("flat", "automatic", "psac", "normalised", "global_")
WHAT = "histogram of gradient norms before training, for advice"
EDGES = tuple(10 ** (k / 4) for k in range(-12, 13))  # 0.001 … 1000, fixed before any norm was seen
CLOSE = 0.03  # of the best alignment: what is nearer than that is as good
RATE = 1e-3  # of the short training on public data, by Adam
# Settings of the planned run that are given here. Both commands call other things public and write folders and JSON of
# their own; a seed of the histogram's noise must not become that of the run's.
SHARED = AdviseConfig.__dataclass_fields__.keys() & TrainConfig.__dataclass_fields__.keys() - {
    "public", "folder", "json", "noise_seed"
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """A method with its best clip norm, and what it did to the proxy's gradients: means over looks."""

    method: str
    clip_norm: float
    alignment: float  # cosine of what would be released with the true mean: bias and noise in one number
    bias: float  # share of the clipped mean that is off the true direction
    noise: float  # over the clipped mean's length
    clipped: float
    scale_free: bool  # whether the clip norm changes nothing but the length of the step


@dataclass(frozen=True)
class Advice:
    """What to write, and why."""

    method: str
    clip_norm: float
    reason: str
    measured_on: str
    command: str
    options: tuple[Option, ...] = ()
    epsilon_spent: float = 0.0  # of the private data, for this advice
    epsilon_with_run: float | None = None  # of this advice and the planned run together


def run(config: AdviseConfig) -> str:
    """Look at gradients that may be looked at, and say what follows."""
    plan = _plan(config)
    assert plan.model is not None  # it is resolved
    use_threads(plan)
    splits = splits_for(plan, plan.model)
    steps, rate = steps_of(plan, len(splits.train)), min(1.0, plan.batch / len(splits.train))
    folder = Path(config.folder or new_folder(f"advise-{short(config.data)}"))
    refuse_used(folder)
    if config.spend is not None:
        advice, figures = _from_norms(config, plan, splits, rate, steps, folder)
    else:
        proxy, about = _proxy(config, plan, splits)
        sigma = plan.noise_multiplier or accounting.calibrate(
            epsilon=plan.epsilon or 0.0, delta=plan.delta, sampling_rate=rate, steps=steps, accountant=plan.accountant
        )
        advice, figures = _from_proxy(config, plan, proxy, about, sigma)
    folder.mkdir(parents=True, exist_ok=True)
    page = write(folder / "advice.html", _page(config, advice, figures))
    values = plain(asdict(advice))
    write(folder / "advice.json", json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    plots = plotted(figures, folder / "plots")
    if config.json:
        places = {"page": str(page), "plots": [str(plot) for plot in plots]}
        return json.dumps(values | places, indent=2, ensure_ascii=False) + "\n"
    return _text(advice, page)


def _plan(config: AdviseConfig) -> TrainConfig:
    """The run that is planned."""
    if config.spend is not None and config.public is not None:
        raise InputError("expected --public or --spend, got both: with public data nothing private need be spent")
    plan = TrainConfig(**{name: getattr(config, name) for name in SHARED})
    if plan.epsilon is None and plan.noise_multiplier is None:
        plan = replace(plan, epsilon=3.0)
    return resolved(plan)


# ------------------------------------------------------------------------------------------------ from a proxy


def _proxy(config: AdviseConfig, plan: TrainConfig, private: Splits) -> tuple[Splits, str]:
    """Data of the same shape whose gradients cost nothing: public ones, or random inputs with random labels."""
    if config.public is not None:
        public = splits_for(replace(plan, data=config.public), plan.model or "")
        if public.shape != private.shape or public.task != private.task or public.classes > private.classes:
            raise InputError(
                f"--public must be like --data, {list(private.shape)} with {private.classes} outputs, got "
                f"{list(public.shape)} with {public.classes}: choose public data of the same kind"
            )
        return replace(public, classes=private.classes), f"public data ({config.public})"
    draw = torch.Generator().manual_seed(plan.seed)
    count = whole("samples", config.samples)
    if private.tokens and not private.train.rows(torch.arange(1))[0].is_floating_point():
        vocabulary = plan.vocabulary or private.vocabulary or 2
        inputs = torch.randint(vocabulary, (count, *private.shape), generator=draw)
    else:
        inputs = torch.rand((count, *private.shape), generator=draw)
    if private.task == "regression":
        labels = torch.randn(count, generator=draw)
    else:
        labels = torch.randint(private.classes, (count,), generator=draw)
    both = Arrays((inputs, labels))
    return replace(private, train=both, test=both), "random inputs with random labels, before training: a rough guide"


def _from_proxy(
    config: AdviseConfig, plan: TrainConfig, proxy: Splits, about: str, sigma: float
) -> tuple[Advice, list[Figure]]:
    model, _, _ = network(plan, proxy)
    device, loss = next(model.parameters()).device, loss_of(proxy)
    rows = torch.arange(min(whole("samples", config.samples), plan.chunk or 512, len(proxy.train)))
    batch = tuple(t.to(device) for t in proxy.train.rows(rows))
    warm = whole("warm_up", config.warm_up, least=0) if config.public is not None else 0
    clips: list[float] = []
    looks: list[Diagnosis] = []
    for part in (0, warm - warm // 2, warm // 2) if warm > 1 else (0,):  # before, half-way and after
        _descend(model, loss, proxy.train, part, plan)
        gradients = per_sample(model, loss, batch)
        if not clips:
            clips = _clips(measure(gradients, [], data="public").norm_edges)
        chosen = [method for family in FAMILIES for method in _with(family, clips)]
        looks.append(
            measure(gradients, chosen, data="public", noise_multiplier=sigma, expected_batch=float(plan.batch))
        )
    options = [_option(family, clips, looks) for family in FAMILIES]
    best = max(options, key=lambda option: option.alignment)
    # of what is as good, the simplest: FAMILIES begins with it
    pick = next(option for option in options if option.alignment >= (1 - CLOSE) * best.alignment)
    advice = Advice(
        method=pick.method,
        clip_norm=pick.clip_norm,
        reason=_reason(pick, options, len(clips), len(looks)),
        measured_on=f"{len(rows)} samples of {about}",
        command=_command(plan, pick.method, pick.clip_norm),
        options=tuple(sorted(options, key=lambda option: -option.alignment)),
    )
    return advice, _figures(looks, clips, pick)


def _descend(model: nn.Module, loss: Loss, data: Arrays, steps: int, plan: TrainConfig) -> None:
    """Ordinary training on public data, so that gradients are also seen of a model that has learnt something."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    draw = torch.Generator().manual_seed(plan.seed)
    device = next(model.parameters()).device
    for _ in range(steps):
        rows = torch.randint(len(data), (min(plan.batch, len(data)),), generator=draw)
        optimizer.zero_grad()
        loss(model, tuple(t.to(device) for t in data.rows(rows))).mean().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _clips(edges: Sequence[float]) -> list[float]:
    """1 and 3 times powers of ten, from far below the longest gradient before training to what it may grow to."""
    if not edges:
        raise InputError("every gradient of the proxy is zero, so that there is nothing to clip: choose another model")
    known = [digit * 10.0**k for k in range(-9, 9) for digit in (1, 3)]
    return [float(f"{clip:.1g}") for clip in known if edges[-1] / 300 <= clip <= 30 * edges[-1]]


def _with(family: str, clips: Sequence[float]) -> list[Method]:
    return [methods.METHODS[family](clip_norm=clip) for clip in clips]


def _option(family: str, clips: Sequence[float], looks: Sequence[Diagnosis]) -> Option:
    """The family's best clip norm: where what is released points along the true mean, on average over looks."""
    rows = []
    for clip, method in zip(clips, _with(family, clips), strict=True):
        seen = [look.methods[str(method)].whole for look in looks]
        noise = [bias.noise / bias.length if bias.noise and bias.length else math.inf for bias in seen]
        rows.append(
            Option(
                method=str(method),
                clip_norm=clip,
                alignment=_mean([bias.alignment or 0.0 for bias in seen]),
                bias=_mean([bias.direction_error for bias in seen]),
                noise=_mean(noise),
                clipped=_mean([bias.clipped for bias in seen]),
                scale_free=False,
            )
        )
    most, least = (pick(row.alignment for row in rows) for pick in (max, min))
    if least > (1 - 1e-3) * most:  # any will do: the nearest to 1, whose step is easiest to think about
        return replace(min(rows, key=lambda row: abs(math.log(row.clip_norm))), scale_free=True)
    # of what is as good, the largest, which bends the gradient least
    return [row for row in rows if row.alignment >= (1 - CLOSE) * most][-1]


def _reason(pick: Option, options: Sequence[Option], clips: int, looks: int) -> str:
    best = max(options, key=lambda option: option.alignment)
    name = _name(pick.method)
    tried = f"{len(options)} methods at {clips} clip norms ({looks} {'look' if looks == 1 else 'looks'})"
    points = f"what it would release has a cosine of {pick.alignment:.3f} with the true gradient"
    first = f"{name} at {pick.clip_norm:g}: {points}, the best of {tried}."
    if best is not pick:
        first = (
            f"{name} at {pick.clip_norm:g}: {points}. Of {tried} the best is {_name(best.method)} with "
            f"{best.alignment:.3f}; {name} is as good, within {CLOSE:.0%}, and simpler."
        )
    parts = (
        f"{pick.bias:.0%} of its clipped mean is off the true direction, and noise is {pick.noise:.3g} times as long."
    )
    worst = min(option.alignment for option in options)
    alike = (
        f" No method stands out: at their best clip norms all are within {CLOSE:.0%}; the learning rate matters more."
        if len(options) > 1 and worst >= (1 - CLOSE) * best.alignment
        else ""
    )
    free = " Its clip norm only scales the step: leave it and tune the learning rate." if pick.scale_free else ""
    return f"{first} {parts}{alike}{free}"


def _figures(looks: Sequence[Diagnosis], clips: Sequence[float], pick: Option) -> list[Figure]:
    lines: list[Mark] = []
    for number, family in enumerate(FAMILIES):
        seen = [[look.methods[str(each)].whole.alignment or 0.0 for look in looks] for each in _with(family, clips)]
        lines.append(Line(_name(family), number, tuple(clips), tuple(map(_mean, seen))))
    top = max(value for line in lines if isinstance(line, Line) for value in line.y)
    chosen = Rule((pick.clip_norm, 0.0), (pick.clip_norm, 1.06 * top))
    x, y = Axis("clip norm", log=True), Axis("cosine of the release with the true gradient", 0.0, 1.06 * top)
    alignment = Figure(
        "advice",
        "How true a release would be",
        "Noise pulls a line down where the clip norm is large, bias where it is small. A level line is a method whose "
        "clip norm only scales the step. Dashed: the advice. Higher is better.",
        (Panel("", x, y, (*lines, chosen)),),
    )
    return [alignment, _histogram(looks[-1].norm_edges, [float(n) for n in looks[-1].norm_counts], pick.clip_norm)]


# ----------------------------------------------------------------------------- from private norms, accounted


def _from_norms(
    config: AdviseConfig, plan: TrainConfig, splits: Splits, rate: float, steps: int, folder: Path
) -> tuple[Advice, list[Figure]]:
    """Release a histogram of all samples' gradient norms through the Gaussian mechanism, and take its median."""
    spend = positive("spend", config.spend or 0.0)
    if plan.epsilon is not None and spend >= plan.epsilon:
        raise InputError(
            f"--spend must be less than the ε of the planned run, {plan.epsilon:g}, got {spend:g}: write --spend "
            f"{plan.epsilon / 10:g}"
        )
    earlier = spent_before(plan.spent)
    before = [] if earlier is None else earlier.entries
    sigma = least_noise(lambda noise: [(Gaussian(noise, WHAT), 1)], spend, plan.delta, plan.accountant)
    event = Gaussian(sigma, WHAT)
    model, _, _ = network(plan, splits)  # its weights are drawn from a seed: they know nothing of the data
    counts = _counts(model, loss_of(splits), splits.train, plan.chunk or 256)
    stream = SecureStream() if config.noise_seed is None else SeededStream(config.noise_seed)
    # a sample is in one bin, so that adding or removing it moves one count by one: sensitivity 1
    released = release(PrivateSum((Part({"counts": counts}, 1.0, 1.0),)), event, stream)
    folder.mkdir(parents=True, exist_ok=True)
    with Ledger(folder / LEDGER) as ledger:
        ledger.extend(before)  # so that --spent need name this folder only
        ledger.record(released.event, sync=True)  # before anything uses what was released
    noisy = released.gradient["counts"].clamp(min=0.0)
    clip = median(noisy)
    method = str(methods.flat(clip_norm=clip))
    planned = None if plan.noise_multiplier is None else PoissonGaussian(plan.noise_multiplier, rate)
    # the command counts this release towards the planned ε, where that is how the run was planned
    both = (
        plan.epsilon if planned is None else spent([*before, (event, 1), (planned, steps)], plan.delta, plan.accountant)
    )
    advice = Advice(
        method=method,
        clip_norm=clip,
        reason=(
            f"flat at {clip:g}: about half of the samples' gradients were longer than that before training, by a noisy "
            f"histogram of their norms (noise {sigma:.3g} on each count). Norms alone do not tell which method is less "
            "biased: for that, give public data with --public."
        ),
        measured_on=f"all {len(splits.train)} private samples, through noise",
        command=_command(replace(plan, spent=str(folder)), method, clip),
        epsilon_spent=spent([(event, 1)], plan.delta, plan.accountant),
        epsilon_with_run=both,
    )
    return advice, [_histogram(EDGES, noisy[1:-1].tolist(), clip)]


def _counts(model: nn.Module, loss: Loss, data: Arrays, size: int) -> Tensor:
    """How many samples' norms lie below EDGES, in each of its bins, and above; not finite ones are in none. Secret."""
    total = torch.zeros(len(EDGES) + 1, dtype=torch.float64)
    edges, device = torch.tensor(EDGES, dtype=torch.float64), next(model.parameters()).device
    for rows in chunks(torch.arange(len(data)), size):
        norms = per_sample(model, loss, tuple(t.to(device) for t in data.rows(rows))).norms().flatten().double().cpu()
        total += torch.bincount(torch.bucketize(norms[norms.isfinite()], edges), minlength=len(total)).double()
    return total


def median(counts: Tensor) -> float:
    """The norm that half of the samples do not exceed, to two digits: within its bin as if norms were even there."""
    half = float(counts.sum()) / 2
    below = 0.0
    for low, high, inside in zip((EDGES[0], *EDGES), (*EDGES, EDGES[-1]), counts.tolist(), strict=True):
        if below + inside >= half:
            within = (half - below) / inside if inside > 0 else 1.0
            return float(f"{low * (high / low) ** within:.2g}")
        below += inside
    return EDGES[-1]


# ------------------------------------------------------------------------------------------------------- words


def _histogram(edges: Sequence[float], counts: Sequence[float], clip: float) -> Figure:
    total = sum(counts) or 1.0
    heights = tuple(count / total for count in counts)
    panel = Panel(
        "",
        Axis("length of a sample’s gradient", log=True),
        Axis("samples", low=0.0, percent=True),
        (Bars(-1, tuple(edges), heights), Rule((clip, 0.0), (clip, max(heights, default=1.0)))),
    )
    caption = "Dashed: the clip norm that is advised. Longer gradients than that are shortened."
    return Figure("norms", "How long gradients are", caption, (panel,))


def _command(plan: TrainConfig, method: str, clip: float) -> str:
    """The planned run with this method: a step is as long as its clip norm, so the learning rate goes the other way."""
    planned = TrainConfig(
        **{name: getattr(plan, name) for name in SHARED},
        method=method,
        learning_rate=float(f"{(plan.learning_rate or 0.5) / clip:.2g}"),
    )
    return shlex.join(["clipwise", "train", *words(planned, first=("data", "model", "method"))])


def _cost(advice: Advice) -> str:
    if not advice.epsilon_spent:
        return "Nothing was read of the private data but its shape and size: no privacy was spent."
    return (
        f"This advice cost ε = {advice.epsilon_spent:.3g} of the private data, as the ledger beside it records. With "
        f"the run below it is {advice.epsilon_with_run:.3f} together: --spent makes that run count both."
    )


def _page(config: AdviseConfig, advice: Advice, figures: Sequence[Figure]) -> str:
    title = f"What to begin with on {short(config.data)}"
    charts = "".join(figure_html(figure) for figure in figures)
    return document(
        title,
        f"<header><p class=brand>clipwise advise</p>{TOGGLE}<h1>{escape(title)}</h1>"
        f"<p class=sub>Measured on {escape(advice.measured_on)}.</p></header><main>"
        "<section class=answer aria-label='The advice'>"
        f"<p class=lead-in>Begin with <b>{escape(advice.method)}</b>.</p><p>{escape(advice.reason)}</p>"
        f"<p class=warn>{escape(_cost(advice))}</p>{_typed(advice.command)}</section>"
        f"<section><div class=pair>{charts}</div></section>{_table(advice)}</main>",
    )


def _typed(command: str) -> str:
    """The command for a page, whose lines break before an option and not within its name."""
    words = re.sub(r"(--[a-z-]+)", r"<span class=word>\1</span>", escape(command))
    return f"<pre tabindex=0>{words}</pre>"


COLUMNS = ("clip norm", "alignment", "bias", "noise", "clipped")


def _numbers(each: Option) -> tuple[str, ...]:
    clip = "any" if each.scale_free else f"{each.clip_norm:g}"
    return clip, f"{each.alignment:.3f}", f"{each.bias:.1%}", f"{each.noise:.3g}", f"{each.clipped:.0%}"


def _table(advice: Advice) -> str:
    if not advice.options:
        return ""
    heads = "<th scope=col>method</th>" + "".join(f"<th scope=col class=num>{name}</th>" for name in COLUMNS)
    lines = "".join(
        f"<tr{' class=best' if each.method == advice.method else ''}><th scope=row>{escape(_name(each.method))}</th>"
        + "".join(f"<td class=num>{number}</td>" for number in _numbers(each))
        + "</tr>"
        for each in advice.options
    )
    return (
        "<section><h2>Each method at its best clip norm</h2><p class=sub>Alignment is the cosine of what would be "
        "released with the true gradient; bias, the share of the clipped mean that is off the true direction; noise, "
        "its length over that of the clipped mean. Means over looks; bold is the advice.</p>"
        "<div class=scroll role=region aria-label='Each method at its best clip norm' tabindex=0>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )


def _text(advice: Advice, page: Path) -> str:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for each in advice.options:
        style = "bold" if each.method == advice.method else ""
        table.add_row(Text(_name(each.method)), *_numbers(each), style=style)
    parts: list[Any] = [Text(f"begin with {advice.method}", style="bold"), Text(advice.reason)]
    parts += ["", table, ""] if advice.options else []
    parts += [Text(f"Measured on {advice.measured_on}. {_cost(advice)}")]
    return f"{rendered(*parts)}{advice.command}\nplot  {page}\n"


def _name(method: str) -> str:
    return method.partition("(")[0].strip("_")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
