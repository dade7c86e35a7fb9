"""``clipwise advise``: which method and clip norm to begin with, and why.

Receives: AdviseConfig: the private data's name and the planned privacy, and public data to look at in their place.
Gives: a method with its clip norm, the reason and the plot: advice.html and advice.json.

Private gradients are read only where ``--spend`` says how much ε that may cost: then a noisy histogram of their norms
is released, which the ledger in the folder records. Otherwise all gradients are those of a proxy: public data, or
random inputs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import nn

from clipwise import accounting, methods
from clipwise.accounting import Ledger
from clipwise.accounting.calibration import least_noise
from clipwise.advice import EDGES, compared, histogram, median, named
from clipwise.cli.options import words
from clipwise.cli.parts import loss_of, network, resolved, spent_before, splits_for, steps_of, use_threads
from clipwise.cli.runs import new_folder
from clipwise.cli.screen import rendered
from clipwise.config import AdviseConfig, TrainConfig
from clipwise.data import Arrays, Splits
from clipwise.noise import release
from clipwise.plain import as_json
from clipwise.randomness import stream_of
from clipwise.records import Loss, SampleGradients, device_of, per_sample
from clipwise.records.trees import on_device
from clipwise.report.advice import COLUMNS, Advice, cost, figures, lengths, numbers, page
from clipwise.report.figures import Figure
from clipwise.report.folder import LEDGER, refuse_unfit, write
from clipwise.report.plots import plotted
from clipwise.report.runs import short
from clipwise.sampling import CHUNK
from clipwise.types import Gaussian, InputError, PoissonGaussian, positive, whole

WHAT = "histogram of gradient norms before training, for advice"
RATE = 1e-3  # of the short training on public data, by Adam
# Settings of the planned run that are given here. Both commands call other things public and write folders and JSON of
# their own; a seed of the histogram's noise must not become that of the run's.
APART = {"public", "folder", "json", "noise_seed"}
SHARED = AdviseConfig.__dataclass_fields__.keys() & TrainConfig.__dataclass_fields__.keys() - APART


def run(config: AdviseConfig) -> str:
    """Look at gradients that may be looked at, and say what follows."""
    plan = _plan(config)
    use_threads(plan)
    folder = Path(config.folder or new_folder(f"advise-{short(config.data)}"))
    refuse_unfit(folder)  # now, before the data are read
    splits = splits_for(plan)
    steps, rate = steps_of(plan, len(splits.train)), min(1.0, plan.batch / len(splits.train))
    if config.spend is not None:
        advice, shown = _from_norms(config, plan, splits, rate, steps, folder)
    else:
        proxy, about = _proxy(config, plan, splits)
        sigma = plan.noise_multiplier or accounting.calibrate(
            epsilon=plan.epsilon or 0.0,
            delta=plan.delta,
            sampling_rate=rate,
            steps=steps,
            accountant=plan.accountant,
            rows_per_person=plan.rows_per_person,
        )
        advice, shown = _from_proxy(config, plan, proxy, about, sigma)
    folder.mkdir(parents=True, exist_ok=True)
    place = write(folder / "advice.html", page(f"What to begin with on {short(config.data)}", advice, shown))
    values = asdict(advice)
    write(folder / "advice.json", as_json(values))
    plots = plotted(shown, folder / "plots")
    if config.json:
        places = {"page": str(place), "plots": [str(plot) for plot in plots]}
        return as_json(values | places)
    return _text(advice, place)


def _plan(config: AdviseConfig) -> TrainConfig:
    """The run that is planned."""
    if config.spend is not None and config.public is not None:
        raise InputError("expected --public or --spend, got both: with public data nothing private need be spent")
    plan = TrainConfig(**{name: getattr(config, name) for name in SHARED})
    if plan.epsilon is None and plan.noise_multiplier is None:
        plan = replace(plan, epsilon=3.0)
    return resolved(plan)


def _proxy(config: AdviseConfig, plan: TrainConfig, private: Splits) -> tuple[Splits, str]:
    """Data of the same shape whose gradients cost nothing: public ones, or random inputs with random labels."""
    if config.public is not None:
        public = splits_for(replace(plan, data=config.public))
        if public.shape != private.shape or public.task != private.task or public.classes > private.classes:
            raise InputError(
                f"--public must be like --data, {list(private.shape)} with {private.classes} outputs, got "
                f"{list(public.shape)} with {public.classes}: choose public data of the same kind"
            )
        return replace(public, classes=private.classes), f"public data ({config.public})"
    draw = torch.Generator().manual_seed(plan.seed)
    count = whole("samples", config.samples)
    if private.tokens:
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
    samples = min(whole("samples", config.samples), plan.chunk or 512, len(proxy.train))
    warm = whole("warm_up", config.warm_up, least=0) if config.public is not None else 0
    found = compared(_looks(plan, proxy, samples, warm), noise_multiplier=sigma, expected_batch=float(plan.batch))
    advice = Advice(
        method=found.pick.method,
        clip_norm=found.pick.clip_norm,
        reason=found.reason,
        measured_on=f"{samples} samples of {about}",
        command=_command(plan, found.pick.method, found.pick.clip_norm),
        options=tuple(sorted(found.options, key=lambda option: -option.alignment)),
    )
    return advice, figures(found)


def _looks(plan: TrainConfig, proxy: Splits, samples: int, warm: int) -> Iterator[SampleGradients]:
    """The proxy's gradients before it is trained on; then, where there are steps to ``warm`` up, half-way and after."""
    model, loss = network(plan, proxy).model, loss_of(proxy)
    batch = on_device(proxy.train.rows(torch.arange(samples)), device_of(model))
    for part in (0, warm - warm // 2, warm // 2) if warm > 1 else (0,):
        _descend(model, loss, proxy.train, part, plan)
        yield per_sample(model, loss, batch)


def _descend(model: nn.Module, loss: Loss, data: Arrays, steps: int, plan: TrainConfig) -> None:
    """Ordinary training on public data, so that gradients are also seen of a model that has learnt something."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    draw = torch.Generator().manual_seed(plan.seed)
    device = device_of(model)
    for _ in range(steps):
        rows = torch.randint(len(data), (min(plan.batch, len(data)),), generator=draw)
        optimizer.zero_grad()
        loss(model, on_device(data.rows(rows), device)).mean().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


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
    before = spent_before(plan.spent).entries
    sigma = least_noise(
        lambda noise: [(Gaussian(noise, WHAT), 1)], spend, plan.delta, plan.accountant, plan.rows_per_person
    )
    event = Gaussian(sigma, WHAT)
    model = network(plan, splits).model  # its weights are drawn from a seed: they know nothing of the data
    secret = histogram(model, loss_of(splits), splits.train, plan.chunk or CHUNK)
    released = release(secret, event, stream_of("secure" if config.noise_seed is None else config.noise_seed))
    folder.mkdir(parents=True, exist_ok=True)
    with Ledger(folder / LEDGER) as ledger:
        ledger.extend(before)  # so that --spent need name this folder only
        ledger.record(released.event, sync=True)  # before anything uses what was released
    noisy = released.gradient["counts"].clamp(min=0.0)
    clip = median(noisy)
    method = str(methods.flat(clip_norm=clip))
    planned = None if plan.noise_multiplier is None else PoissonGaussian(plan.noise_multiplier, rate)
    # the command counts this release towards the planned ε, where that is how the run was planned
    spent = partial(
        accounting.spent, delta=plan.delta, accountant=plan.accountant, rows_per_person=plan.rows_per_person
    )
    both = plan.epsilon if planned is None else spent([*before, (event, 1), (planned, steps)])
    advice = Advice(
        method=method,
        clip_norm=clip,
        reason=(
            f"flat at {clip:g}: about half of the samples' gradients were longer than that before training, by a noisy "
            f"histogram of their norms (noise {sigma:.3g} on each count). Norms alone do not tell which method is less "
            "biased: for that, give public data with --public."
        ),
        measured_on=f"all {len(splits.train)} private samples, through noise",
        command=_command(replace(plan, spent=(str(folder),)), method, clip),
        epsilon_spent=spent([(event, 1)]),
        epsilon_with_run=both,
    )
    return advice, [lengths(EDGES, noisy[1:-1].tolist(), clip)]


def _command(plan: TrainConfig, method: str, clip: float) -> str:
    """The planned run with this method: a step is as long as its clip norm, so the learning rate goes the other way."""
    planned = TrainConfig(
        **{name: getattr(plan, name) for name in SHARED},
        method=method,
        learning_rate=float(f"{(plan.learning_rate or 0.5) / clip:.2g}"),
    )
    return shlex.join(["clipwise", "train", *words(planned, first=("data", "model", "method"))])


def _text(advice: Advice, page: Path) -> str:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for each in advice.options:
        style = "bold" if each.method == advice.method else ""
        table.add_row(Text(named(each.method)), *numbers(each), style=style)
    parts: list[Any] = [Text(f"begin with {advice.method}", style="bold"), Text(advice.reason)]
    parts += ["", table, ""] if advice.options else []
    parts += [Text(f"Measured on {advice.measured_on}. {cost(advice)}")]
    return f"{rendered(*parts)}{advice.command}\nplot  {page}\n"
