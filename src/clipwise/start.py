"""Before the first step: everything is checked, and what was left open is filled in.

Receives: a model, a loss that gives one value per sample, data, a method and a privacy budget.
Gives: ``make_private``, which gives Private; whatever is wrong is said before anything is trained. Privacy and
refuse_unknown, for ``train``, which hands its options on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise import methods, postprocess, ranks
from clipwise.accounting import Ledger
from clipwise.accounting import spent as spent_on
from clipwise.accounting.calibration import least_noise, steps_in
from clipwise.accounting.dice import DicePlan, planned
from clipwise.accounting.events import cost
from clipwise.data import RowDataset, as_dataset
from clipwise.data.copies import (
    refuse_kept,
    refuse_private,
    refuse_shared,
    warn_of_copies,
    warn_of_named,
    warn_of_numbers,
)
from clipwise.data.datasets import held
from clipwise.data.fitted import warn_of_fitted
from clipwise.data.numbered import refuse_numbered
from clipwise.data.parts import warn_of_parts
from clipwise.elsewhere import OPTIONS
from clipwise.engine import Views
from clipwise.losses import cross_entropy
from clipwise.methods import Method
from clipwise.passes import Passes, fingerprint
from clipwise.plain import rounded_up
from clipwise.postprocess import Post, identity
from clipwise.private import Private
from clipwise.randomness import stream_of
from clipwise.records import Capture, Loss
from clipwise.records.chance import kept, seeded
from clipwise.records.compiled import CompiledCapture
from clipwise.refusals import check_model, check_weights, try_loss
from clipwise.sampling import CHUNK, largest_batch
from clipwise.trained import trained_elsewhere
from clipwise.types import Batch, Event, InputError, fraction, nearest, positive, warn, whole

P = ParamSpec("P")
R = TypeVar("R")
NEARLY, DROWNED = 0.9, 5.0  # with this share of ε spent, so many times the noise is warned of


def refuse_unknown(who: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse an option that is not there, with what to write for it."""
    for name in given:
        if name not in known:
            write = f"write {OPTIONS[name]}" if name in OPTIONS else nearest(name, known)
            raise TypeError(f"{who} has no option {name!r}: {write}")


def spelled(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; an option that it does not have is an error that names the nearest one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


@spelled
def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    *,
    loss: Loss = cross_entropy,
    method: Method | str | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int = 256,
    chunk: int | Literal["auto"] | None = None,
    noise: str | int = "secure",
    accountant: str = "pld",
    rows_per_person: int = 1,
    self_test: bool = True,
    compile: bool = False,
    post: Post | str | None = None,
    views: Views | None = None,
    public: Tensor | None = None,
    collate: Callable[[list[Any]], Batch] | None = None,
    spent: Ledger | None = None,
    ledger: Ledger | None = None,
) -> Private:
    """Private training for a loop of your own.

    loss: ``loss(model, batch)`` with one value per sample; ``clipwise.cross_entropy`` for (inputs, labels).
    method: what is done with each gradient, such as ``clipwise.psac()`` or "psac(0.1)"; ``flat()`` unless given.
    epsilon, delta: how private; the noise is calibrated to them. noise_multiplier: or the noise itself.
    epochs or steps: how long.
    batch: the expected batch; each sample joins a step with probability batch/samples.
    chunk: rows that go through the model at a time, as many as fit the memory of a GPU, 256 on a processor.
    noise: "secure" draws from the operating system's entropy; a seed is for tests, and the statement names it.
    accountant: "pld", which is tight, or "rdp".
    rows_per_person: how many samples may be one person's: ε then holds for all of them together, with more noise.
    self_test: compare with the slow way before the first step; without it, the statement says so.
    compile: graphs of one fixed chunk, to which batches are padded: minutes at the start, then faster steps.
    post: filters what was released before the optimizer sees it, such as "heavy_ball(0.9)".
    views: for self_augmentation(augment="own"): called for one row at a time, with that row's own generator, so that it
        cannot mix samples. public: the inputs that batch_clipping puts beside each sample.
    collate: makes one batch of a list of samples, for data sets whose samples cannot be stacked.
    spent: what was released from these data before; it counts towards ``epsilon`` and stands in the statement.
    ledger: where this run is recorded, behind what it holds already, which counts too.
    """
    ranks.refuse_apart()
    # first what needs no data, then what needs few, then the noise, whose calibration takes seconds
    parameters = check_model(model, loss, optimizer)
    delta = fraction("delta", delta, open_end=True)
    _check_one("how long to train", "epochs=20", epochs=epochs, steps=steps)
    _check_one("how private", "epsilon=3", epsilon=epsilon, noise_multiplier=noise_multiplier)
    asked = positive("noise_multiplier", noise_multiplier or 0) if epsilon is None else positive("epsilon", epsilon)
    spent_on((), delta, accountant, rows_per_person=rows_per_person)  # refuses what it does not know
    chosen, after = methods.as_method("flat" if method is None else method), _post(post)
    ranks.check_method(chosen)
    check_weights(chosen, parameters)  # also a block that no parameter falls in: now, not after some steps
    stream = stream_of(noise)
    earlier, added = _released(spent, ledger)
    dataset = as_dataset(data, collate)
    rows, batch = len(dataset), whole("batch", batch)
    _check_sizes(rows, batch, delta)
    rows_held = held(dataset)
    with kept({p.device for p in parameters.values() if p.is_cuda}):
        _check_rows(dataset, rows_held, rows_per_person)
    _check_public(public, chosen, dataset)
    _check_named(model, loss, views, rows_held)
    _check_recall(chosen, batch, rows)
    rate = batch / rows
    count = whole("steps", steps) if steps is not None else steps_in(epochs or 0, rate)
    size = _chunk(chunk, batch / ranks.count(), rows, compile)
    _warn_of_trained(model, earlier)
    if self_test and not any(phase.companions for phase in chosen.phases):  # a model of units takes no single rows
        try_loss(model, loss, dataset, size)
    plan = DicePlan.of(chosen, float(batch), rows)
    recorded = functools.partial(planned, plan, sampling_rate=rate, steps=count)  # by so much noise
    for event, _ in recorded(asked):
        cost(event, rows_per_person)  # refuse now what has no proof, also where nothing is calibrated
    sigma = asked if epsilon is None else _calibrated(recorded, asked, earlier, delta, accountant, rows_per_person)
    if ranks.count() > 1:
        few = torch.tensor([0, rows // 2, rows - 1], device="cpu")
        same = {
            "data": (rows, fingerprint(dataset, few).hex()),
            "parameters": {name: list(p.shape) for name, p in parameters.items()},
            "method": str(chosen),
            "batch": batch,
            "steps": count,
            "spent": [f"{n} × {event}" for event, n in earlier],  # a process without it would state too small an ε
            "noise_multiplier": sigma,
            "noise": stream.name,
            "post": str(after),
        }
        stream = ranks.begin(model, stream, same)
    groups = [block.names for block in chosen.blocks(tuple(parameters))]
    fast = CompiledCapture(model, loss, size, groups) if compile else None
    passes = Passes(Capture(model, loss), dataset, float(batch), size, fast, views, public)
    if chunk == "auto" or (chunk is None and not compile):
        passes.fit_chunk(chosen)  # before the self-test, which looks at as many samples as a chunk holds
    private = Private(
        passes,
        optimizer,
        method=chosen,
        noise_multiplier=sigma,
        target=epsilon,
        delta=delta,
        steps=count,
        stream=stream,
        accountant=accountant,
        rows_per_person=rows_per_person,
        self_tested=self_test,
        post=after,
        earlier=earlier,
    )
    private.test_mode(parameters)
    book = Ledger() if ledger is None else ledger
    book.extend(added)  # last: a run that was refused, and is made again, counts it once
    private.record_in(book)
    return private


class Privacy(TypedDict, total=False):
    """What ``train`` hands on to ``make_private``: it has the other arguments itself, and a ledger in its folder."""

    method: Method | str | None
    epsilon: float | None
    delta: float
    noise_multiplier: float | None
    epochs: float | None
    steps: int | None
    batch: int
    chunk: int | Literal["auto"] | None
    noise: str | int
    accountant: str
    rows_per_person: int
    self_test: bool
    compile: bool
    post: Post | str | None
    views: Views | None
    public: Tensor | None
    collate: Callable[[list[Any]], Batch] | None
    spent: Ledger | None


def _post(given: Post | str | None) -> Post:
    chosen = postprocess.parse(given) if isinstance(given, str) else identity() if given is None else given
    if not isinstance(chosen, Post):
        raise InputError(f"expected a post-processing such as clipwise.postprocess.heavy_ball(0.9), got {given!r}")
    return chosen


def _released(spent: Ledger | None, ledger: Ledger | None) -> tuple[list[tuple[Event, int]], list[tuple[Event, int]]]:
    """All that counts towards ε before the first step, and what of it the run's ledger does not hold yet."""
    for name, book in (("spent", spent), ("ledger", ledger)):
        if not isinstance(book, Ledger | None):
            raise InputError(
                f"{name} must be a ledger, got {book!r}: write {name}=clipwise.Ledger(PATH of ledger.jsonl)"
            )
    if spent is not None and spent.path is not None and not spent.releases:
        # a ledger of one's own may begin in a new file; what was spent before is in one that is there, and is not lost
        found = "holds nothing" if spent.path.exists() else "is not there"
        raise InputError(
            f"spent must be a ledger that something was recorded in, but the file {spent.path} {found}: write the "
            "ledger.jsonl of the earlier run or advice, or leave spent out"
        )
    held = [] if ledger is None else ledger.entries
    added = [] if spent is None or spent is ledger else spent.entries
    return [*held, *added], added


def _check_sizes(rows: int, batch: int, delta: float) -> None:
    if batch > rows:
        raise InputError(
            f"batch must be at most the {rows} samples of the data, got {batch}: the rate is batch/samples"
        )
    if delta >= 1 / rows:
        warn(f"delta={delta:g} is not below 1/samples = {1 / rows:.2g}: it would allow a sample's publication")


def _check_rows(data: RowDataset, rows: RowDataset, rows_per_person: int) -> None:
    """Refuse or warn of samples that are not one person's alone, as far as the rows, read or held, show it."""
    warn_of_copies(rows, rows_per_person)
    warn_of_fitted(rows)
    refuse_numbered(data, seeded)  # before others read: what has a number by then keeps it
    refuse_shared(data, seeded)
    warn_of_numbers(data)
    if rows_per_person == 1:
        warn_of_parts(data, seeded)


def _check_named(model: nn.Module, loss: Loss, views: Views | None, rows: RowDataset) -> None:
    """Refuse a model that holds private samples, and warn of functions that do."""
    refuse_kept(model, rows)
    warn_of_named("the loss", loss, rows)
    if views is not None:
        if not callable(views):
            raise InputError(f"views must be a function of a row, a count and a generator, got {type(views).__name__}")
        warn_of_named("views", views, rows)


def _check_public(public: Tensor | None, method: Method, data: RowDataset) -> None:
    """Refuse public inputs that are private, or no inputs, and a method that needs some and has none."""
    if not isinstance(public, Tensor | None):
        raise InputError(f"public must be a tensor of inputs, got {type(public).__name__}: write torch.as_tensor(…)")
    needing = [part.name for phase in method.phases for part in phase.parts() if part.companions]
    if needing and public is None:
        raise InputError(f"{needing[-1]} needs public inputs, got none; write public=a tensor of them")
    if needing and public is not None:
        refuse_private(public, data)


def _check_recall(method: Method, batch: int, rows: int) -> None:
    for phase in method.phases:
        if phase.recall is not None and batch < rows:
            raise InputError(
                f"{phase.name} is for full batches, since every sample remembers every step: expected batch={rows}, "
                f"all samples, got {batch}; write batch={rows}, or use inner_momentum"
            )


def _warn_of_trained(model: nn.Module, counted: list[tuple[Event, int]]) -> None:
    if trained_elsewhere(model, counted):
        warn(
            "this model was trained by a private run before, and the statement of this one will not count it: if its "
            "data were the same, write spent=that run's ledger"
        )


def _calibrated(
    recorded: Callable[[float], list[tuple[Event, int]]],
    epsilon: float,
    earlier: list[tuple[Event, int]],
    delta: float,
    accountant: str,
    rows: int,
) -> float:
    before = spent_on(earlier, delta, accountant, rows_per_person=rows) if earlier else 0.0
    if before >= epsilon:
        raise InputError(
            f"epsilon={epsilon:g} is spent: what was released before costs {rounded_up(before)}; write a larger epsilon"
        )

    def least(spent: list[tuple[Event, int]]) -> float:
        return least_noise(lambda noise: [*spent, *recorded(noise)], epsilon, delta, accountant, rows)

    found = least(earlier)
    if before > NEARLY * epsilon and found > DROWNED * (alone := least([])):
        warn(
            f"what was released before costs {rounded_up(before)} of epsilon={epsilon:g}, so that little is left: "
            f"these steps get a noise multiplier of {found:.4g}, where {alone:.4g} would do with nothing spent, and "
            "teach the model next to nothing; write a larger epsilon, or keep the model as it is"
        )
    return found


def _check_one(what: str, example: str, **given: float | None) -> None:
    """Refuse to be told one thing in two ways, or in none."""
    count = sum(value is not None for value in given.values())
    if count != 1:
        only = "only " if count else ""
        raise InputError(f"say {what} by {only}one of {' or '.join(given)}; write for instance {example}")


def _chunk(chunk: int | str | None, batch: float, rows: int, compile: bool) -> int:
    """How many rows go through the model at a time; a compiled chunk holds nearly every Poisson batch whole."""
    if isinstance(chunk, Integral):
        return whole("chunk", chunk)
    if chunk not in (None, "auto"):
        raise InputError(f"chunk must be a whole number or 'auto', got {chunk!r}")
    if compile and chunk == "auto":
        raise InputError("expected chunk as a number with compile=True, since its graphs are of one size, got 'auto'")
    return min(rows, largest_batch(batch)) if compile else CHUNK
