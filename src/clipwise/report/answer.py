"""What the numbers of several runs say, in a few sentences and a table.

Receives: runs as they were recorded.
Gives: RunNumbers of each run; answer, who is least biased and why, in sentences with names between asterisks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from clipwise.plain import four_digits, no_less, rounded_up
from clipwise.report.figures import fair, left_out
from clipwise.report.runs import ROOT_MEAN_SQUARE, Recorded, attacked, comparable, own, rows_per_person
from clipwise.report.statement import for_whom

APART = "These runs are of different data or tasks, so nothing here ranks them; each for itself:"
DIVERGED = "Every run diverged, so there is nothing to rank."
OWN = (
    "Each run had gradients of its own, so this does not rank the methods: clipwise compare, or in Python a Monitor "
    "with all of them, asks them about the same gradients."
)
MANY = 10  # evaluation samples of a class: fewer may be missed by chance
NEAR = 0.05  # of bias: who is nearer than that to the least is named beside it


@dataclass(frozen=True)
class RunNumbers:
    """One run in numbers; None is what nobody measured. Everything but ε, δ and the releases is not private."""

    name: str
    method: str
    rival: bool  # whether all runs had the same data and task, so that they can be ranked
    epsilon: float
    delta: float
    rows_per_person: int  # how many samples ε holds for together
    releases: int
    accuracy: float | None
    error: float | None  # of a regression, in the place of the accuracy: root mean squared, in the label's own unit
    bias: float | None  # direction error, mean over the run's own looks: 0 is unbiased
    same_bias: float | None  # the same, over the looks of all runs: the same gradients for every method
    noise: float | None  # length of the noise over that of the clipped mean, geometric mean over looks
    alignment: float | None  # cosine of what is released with the true mean, mean over looks
    clipped: float | None  # share of samples that were shortened, mean over looks
    same_clipped: float | None  # the same, over the looks of all runs
    spread: float | None  # weight of a short gradient (5 % quantile) over that of a long one (95 %); 1 is equal
    unseen: str  # state of the method that no look at gradients shows, such as its feedback
    ece: float | None
    unfound: tuple[int, ...]  # classes of which the final model finds no evaluation sample, though there are many
    audit: bool | None  # whether every claim held
    attacked: bool  # whether that audit attacked anything, and did not add the ledger up alone
    roc_auc: float | None  # of two classes: how well they are told apart, however rare one of them is
    baseline: float | None  # accuracy, or error, of always saying the most frequent class, or the mean
    diverged: int | None  # the step at which it was first seen without finite numbers
    without: float | None  # the best accuracy, or error, of the same network without privacy, which no ε covers
    setup: tuple[str, ...]  # method, and all settings but the seed: runs of the same repeat each other; () if unknown

    @property
    def said(self) -> str:
        """The name as a sentence has it, between asterisks."""
        return f"*{self.name.replace('*', '∗')}*"


@dataclass(frozen=True)
class Quantity:
    """A number of each run, how it is printed, and which of several is the best: max, min, or none is."""

    value: Callable[[RunNumbers], float | None]
    shown: Callable[[float], str]
    pick: Callable[[Iterable[float]], float] | None = None


ACCURACY = Quantity(lambda row: row.accuracy, "{:.1%}".format, max)
ERROR = Quantity(lambda row: row.error, four_digits, min)
ALIGNMENT = Quantity(lambda row: row.alignment, "{:.3f}".format, max)
ROC_AUC = Quantity(lambda row: row.roc_auc, "{:.3f}".format, max)
NOISE = Quantity(lambda row: row.noise, "{:.2g}".format, min)
# what says whose model is best → how that is said, and what it is
TITLES = {
    ACCURACY: ("most accurate model", "accuracy"),
    ERROR: ("least error", "error"),
    ROC_AUC: ("highest ROC AUC", "ROC AUC"),
}


def in_numbers(runs: Sequence[Recorded]) -> list[RunNumbers]:
    """The runs in numbers."""
    same, clipped, rival = fair(runs, "direction_error"), fair(runs, "clipped"), comparable(runs)
    return [
        RunNumbers(
            name=run.name,
            method=run.statement["method"],
            rival=rival,
            epsilon=run.statement["epsilon"],
            delta=run.statement["delta"],
            rows_per_person=rows_per_person(run.statement),
            releases=run.statement["releases"],
            accuracy=run.last.get("accuracy"),
            error=run.last.get("error"),
            bias=_mean(run, "direction_error"),
            same_bias=same[run.name],
            noise=_noise(run),
            alignment=_mean(run, "alignment"),
            clipped=_mean(run, "clipped"),
            same_clipped=clipped[run.name],
            spread=_spread(run, runs),
            unseen=next((own(look)["unseen"] for look in run.looks), ""),
            ece=None if run.calibration is None else run.calibration["ece"],
            unfound=_unfound(run),
            audit=None if run.audit is None else bool(run.audit["passed"]),
            attacked=run.audit is not None and attacked(run.audit["rows"]),
            roc_auc=run.last.get("roc_auc"),
            baseline=run.last.get("baseline"),
            diverged=run.diverged,
            without=_without(run),
            setup=_setup(run),
        )
        for run in runs
    ]


def answer(found: Sequence[RunNumbers]) -> list[str]:
    """The answer, its reason, what privacy costs where that is known, and what it leaves open."""
    if len(found) == 1:
        return [*_single(found[0]), *privacy_costs(found)]
    if not all(row.rival for row in found):
        return [APART, *(sentence for row in found for sentence in _single(row)[:1])]
    found = [row for row in found if row.diverged is None]
    if len(found) < 2:
        return [*_single(found[0]), *privacy_costs(found)] if found else [DIVERGED]
    ranks = _Ranks.of(found)
    if len(ranks.order) < 2:
        return [*_quality(found, []), *privacy_costs(found)]
    said = [_no_difference(ranks)] if ranks.alike else [_least_and_most(ranks)]
    if not ranks.same:
        said.append(OWN)
    elif not ranks.alike:
        said.append(_reason(ranks.order[0], ranks.order[-1]))
    if not ranks.alike:
        said += _noisier(found, ranks.order[0])
    return [*said, *_quality(found, best(found, ALIGNMENT)), *privacy_costs(found)]


@dataclass(frozen=True)
class _Ranks:
    """Runs by their bias, least first."""

    order: Sequence[RunNumbers]
    same: bool  # whether it is their methods' on the same gradients; otherwise each run's on its own

    @classmethod
    def of(cls, found: Sequence[RunNumbers]) -> _Ranks:
        shared = [row for row in found if row.same_bias is not None]
        same = len(shared) > 1
        ranks = cls(shared if same else [row for row in found if row.bias is not None], same)
        return replace(ranks, order=sorted(ranks.order, key=ranks.bias))

    def bias(self, row: RunNumbers) -> float:
        return (row.same_bias if self.same else row.bias) or 0.0

    def like(self, end: RunNumbers) -> list[RunNumbers]:
        """Those whose bias is printed like this one's."""
        return [row for row in self.order if _whole(self.bias(row)) == _whole(self.bias(end))]

    @property
    def alike(self) -> bool:
        """Whether all are printed alike."""
        return self.like(self.order[0]) == self.order


def _no_difference(ranks: _Ranks) -> str:
    return (
        f"{'There' if ranks.same else 'Over their own runs there'} is no difference in bias between "
        f"{_and(ranks.order)}: {_whole(ranks.bias(ranks.order[0]))} of the clipped mean gradient points away from the "
        "true one."
    )


def _least_and_most(ranks: _Ranks) -> str:
    bias, (least, *_, most) = ranks.bias, ranks.order
    first, last = ranks.like(least), ranks.like(most)
    one = len(first) == 1
    where = "" if ranks.same else "Over its own run " if one else "Over their own runs "
    points = f"{_whole(bias(least))} of {'its' if one else 'the'} clipped mean gradient points away from the true one"
    near = [row for row in ranks.order if row not in (*first, *last) and bias(row) < bias(least) + NEAR]
    close = f" Close behind: {', '.join(f'{row.said} ({_whole(bias(row))})' for row in near)}." if near else ""
    end = f"The most biased {'is' if len(last) == 1 else 'are'} {_and(last)} with {_whole(bias(most))}."
    return f"{where}{_and(first)} {'is' if one else 'are'} the least biased: {points}.{close} {end}"


def _noisier(found: Sequence[RunNumbers], least: RunNumbers) -> list[str]:
    """That the least biased is not the least noisy, where that is so."""
    quiet = best(found, NOISE)
    if not quiet or least.noise is None or least in quiet:
        return []
    noisy, quietest = (NOISE.shown(row.noise or 0.0) for row in (least, quiet[0]))
    return [
        f"Less bias can mean more noise: with {least.said} one step’s noise is {noisy} times as long as the gradient "
        f"it hides, with {_and(quiet)}, the least noisy, {quietest} times."
    ]


def ranking(found: Sequence[RunNumbers]) -> str:
    """Every method's bias on the same gradients, least first; nothing where fewer than two have one."""
    known = sorted((row.same_bias, row.name) for row in found if row.same_bias is not None)
    if len(known) < 2:
        return ""
    said = ", ".join(f"{name} {bias:.1%}" for bias, name in known)
    alike = f"{known[0][0]:.1%}" == f"{known[-1][0]:.1%}"
    others = left_out("Not ranked", {row.name: row.diverged for row in found if row.same_bias is None})
    return f"On the same gradients, {'no difference in bias' if alike else 'least biased first'}: {said}.{others}"


def privacy_costs(found: Sequence[RunNumbers]) -> list[str]:
    """How much better the same network was without privacy than the best of the runs; nothing where nobody looked."""
    known = [row for row in found if row.without is not None and row.diverged is None]
    of = ERROR if any(row.error is not None for row in known) else ACCURACY
    first = next(iter(best(known, of) or known), None)
    if first is None or first.without is None or (reached := of.value(first)) is None:
        return []
    said = f"Without privacy the same network reached {of.shown(first.without)}"
    if of is ERROR:
        said = f"Without privacy the error of the same network was {of.shown(first.without)}"
    # of what is printed, so that the difference is the one that a reader computes
    lost = round(100 * first.without, 1) - round(100 * reached, 1) if of is ACCURACY else reached - first.without
    if first.baseline is not None and first.without <= first.baseline and of is ACCURACY:
        return [
            f"{said}, no better than always saying the most frequent class: it may need a smaller learning rate of its "
            "own, 'no privacy @ RATE'."
        ]
    if lost <= 0:
        return [
            f"{said}, no better than {first.said}: it may need a learning rate of its own, 'no privacy @ RATE'. "
            "No ε covers that number."
        ]
    cost = f"{lost:.1f} percentage points" if of is ACCURACY else f"{four_digits(lost)} more of error"
    return [
        f"{said}: privacy costs {first.said} {cost}, at ε = {rounded_up(first.epsilon)}. That is one run too, and no ε "
        "covers it."
    ]


def best(found: Sequence[RunNumbers], of: Quantity) -> list[RunNumbers]:
    """Who has the best value as it is printed; nobody where all print alike, and nobody whose run diverged."""
    ended = [row for row in found if row.diverged is None]
    known = [(v, row) for row in ended if (v := of.value(row)) is not None and math.isfinite(v)]
    if of.pick is None or not known:
        return []
    top = of.shown(of.pick(v for v, _ in known))
    first = [row for v, row in known if of.shown(v) == top]
    return first if len(first) < len(known) or len(known) == 1 else []


def judged(found: Sequence[RunNumbers]) -> Quantity:
    """What says whose model is best: of a rare class the ROC AUC, where no accuracy is above the baseline."""
    if any(row.error is not None for row in found):
        return ERROR
    above = any((row.accuracy or 0.0) > (row.baseline or 0.0) for row in found if row.diverged is None)
    return ACCURACY if above or all(row.roc_auc is None for row in found) else ROC_AUC


def told(found: Sequence[RunNumbers]) -> list[str]:
    """The answer as plain text, what is wrong with runs first."""
    return [*alarms(found), *(text.replace("*", "") for text in answer(found))]


def alarms(found: Sequence[RunNumbers]) -> list[str]:
    """What to know before anything else, as plain text: claims that are false, and runs that came to nothing."""
    said = [refuted(found), *map(_diverged, found), *_no_better(found), *map(_misses, found), _one_class(found)]
    return [text.replace("*", "") for text in said if text]


def refuted(found: Sequence[RunNumbers]) -> str:
    """What to know before anything else: whose ε an audit found to be false."""
    false = [row.said for row in found if row.audit is False]
    return f"An audit shows that the ε claimed of {', '.join(false)} is FALSE: do not rely on it." if false else ""


def _diverged(row: RunNumbers) -> str:
    if row.diverged is None:
        return ""
    return (
        f"{row.said} had diverged at step {row.diverged}: its loss or gradients were not finite; write a smaller "
        "--learning-rate."
    )


def _misses(row: RunNumbers) -> str:
    """Which classes it never finds, rare ones say; one that is no better than one class alone misses all others."""
    if not row.unfound or row.diverged is not None or (row.accuracy or 0.0) <= (row.baseline or 0.0):
        return ""
    some = ", ".join(map(str, row.unfound[:8])) + (", …" if len(row.unfound) > 8 else "")
    return (
        f"{row.said} finds no evaluation sample of the class{'es' if len(row.unfound) > 1 else ''} {some}, counted "
        "from 0, which the accuracy does not show: try more epochs, a larger batch or a larger ε."
    )


def _no_better(found: Sequence[RunNumbers]) -> list[str]:
    """Who learnt nothing: no better on the evaluation data than always saying the same; and what may help."""
    lost: dict[str, list[RunNumbers]] = {}
    for row in found:
        if row.baseline is None or row.diverged is not None:
            continue
        if row.accuracy is not None and row.accuracy <= row.baseline < 1:  # than 1 nobody could be better
            same = f"the most frequent class, which is right for {row.baseline:.1%} of the evaluation samples"
        elif row.accuracy is None and row.error is not None and row.error >= row.baseline:
            same = f"the mean of the evaluation labels, whose error is {four_digits(row.baseline)}"
        else:
            continue
        lost.setdefault(same, []).append(row)
    return [
        f"{_and(alike)} {'is' if len(alike) == 1 else 'are'} no better than always saying {same}{_areas(alike)}: try "
        f"more epochs, a larger batch, another learning rate or a larger ε{_rare(alike)}."
        for same, alike in lost.items()
    ]


def _areas(found: Sequence[RunNumbers]) -> str:
    """Where one class is rare, what is no better in accuracy may yet tell the two apart."""
    known = sorted({ROC_AUC.shown(row.roc_auc) for row in found if row.roc_auc is not None})
    if not known:
        return ""
    areas = "–".join(dict.fromkeys((known[0], known[-1])))
    return f" (ROC AUC {areas}: 0.5 is guessing, and well above it the probabilities tell the classes apart)"


def _rare(found: Sequence[RunNumbers]) -> str:
    known = any(row.roc_auc is not None for row in found)
    return "; a class that is rare is predicted more often by clipwise predict --threshold 0.1" if known else ""


def always_the_same(found: Sequence[RunNumbers]) -> list[str]:
    """What needs no model, without which an accuracy says little where classes are unbalanced."""
    known = next((row for row in found if row.baseline is not None), None)
    if known is None or known.baseline is None:
        return []
    if known.error is not None:
        return [f"Always saying the mean of the evaluation labels has an error of {ERROR.shown(known.baseline)}."]
    return [f"Always saying the most frequent class is right for {ACCURACY.shown(known.baseline)}."]


def _one_class(found: Sequence[RunNumbers]) -> str:
    alone = [row for row in found if row.accuracy is not None and row.baseline == 1]
    return (
        f"All evaluation samples of {_and(alone)} are of one class, so that accuracy says nothing: look at the labels."
        if alone
        else ""
    )


def _single(row: RunNumbers) -> list[str]:
    reached = ""
    if row.accuracy is not None:
        reached = f" reached {row.accuracy:.1%} accuracy"
    elif row.error is not None:
        reached = f" ended with an error ({ROOT_MEAN_SQUARE}) of {four_digits(row.error)}"
    at = f"ε = {rounded_up(row.epsilon)}, δ = {no_less(row.delta)}{for_whom(row.rows_per_person)}"
    said = [f"{row.said}{reached or ' was trained'} at {at}."]
    said += always_the_same([row])
    if row.bias is not None and row.clipped is not None:
        said.append(
            f"{row.bias:.1%} of its clipped mean gradient points away from the true one, and {row.clipped:.0%} of the "
            "samples are shortened: means over the run."
        )
    return said


def _reason(least: RunNumbers, most: RunNumbers) -> str:
    if least.spread is not None and most.spread is not None and 1.2 * least.spread < most.spread:
        mild, harsh = (_times(row.spread or 1.0) for row in (least, most))
        mild = "" if mild == "1" else f"{mild} times "
        return (
            f"Why: it treats samples more equally. With {least.said} a short gradient weighs {mild}as much "
            f"as a long one, with {most.said} {harsh} times; unclipped, all weigh the same."
        )
    few, many = least.same_clipped, most.same_clipped
    if few is None or many is None:
        few, many = least.clipped, most.clipped
    if few is not None and many is not None and 1.2 * few < many:
        return (
            f"Why: it leaves more samples as they are. It shortens {few:.0%} of them, {most.said} {many:.0%}, and "
            "what is cut off long gradients is missing from the mean."
        )
    return "Why: “Where the bias comes from” shows how unequally each method treats samples."


def _quality(found: Sequence[RunNumbers], truest: Sequence[RunNumbers]) -> list[str]:
    """Who is best where bias and noise meet, and whose model is."""
    said = []
    if truest:
        what = f"what {_and(truest)} release{'s' if len(truest) == 1 else ''} points"
        said.append(f"With bias and noise together, {what} best along the true gradient.")
    of = judged(found)
    said += _top(found, truest, of, *TITLES[of])
    return [" ".join([*said, *always_the_same(found), *chance(found)])] if said else []


def chance(found: Sequence[RunNumbers]) -> list[str]:
    """How far apart the runs of one setting are, where any was repeated; in any case that this is chance."""
    of, same = judged(found), dict[tuple[str, ...], list[RunNumbers]]()
    for row in found:
        if row.setup and row.diverged is None and (value := of.value(row)) is not None and math.isfinite(value):
            same.setdefault(row.setup, []).append(row)
    spreads = []
    for (said, _), rows in same.items():
        values = [value for row in rows if (value := of.value(row)) is not None]
        if len(rows) > 1:
            mean, apart = of.shown(statistics.fmean(values)), of.shown(statistics.stdev(values))
            spreads.append(f"{said.replace('*', '∗')} {mean} ± {apart} ({len(rows)} runs)")
    if not spreads:
        return ["One run each: small differences are chance."]
    return [f"Mean and standard deviation of the {TITLES[of][1]} of runs with the same settings: {', '.join(spreads)}."]


def _top(found: Sequence[RunNumbers], truest: Sequence[RunNumbers], of: Quantity, whose: str, what: str) -> list[str]:
    """Who has the best, and how much; what all share where there is no difference; nothing if nobody has one."""
    first = best(found, of)
    known = [of.shown(v) for row in first or found if (v := of.value(row)) is not None and math.isfinite(v)]
    if len(first) == 1:
        also = "also " if first == list(truest) else ""
        return [f"The {whose} is {also}{first[0].said}’s: {known[0]} at ε = {rounded_up(first[0].epsilon)}."]
    if first:
        return [f"The {whose} is that of {_and(first)}, with no difference between them: {known[0]}."]
    return [f"There is no difference in {what}: {known[0]}."] if known else []


def _and(found: Sequence[RunNumbers]) -> str:
    *most, last = [row.said for row in found]
    return f"{', '.join(most)} and {last}" if most else last


def _whole(share: float) -> str:
    return f"{share:.0%}"


def _mean(run: Recorded, name: str) -> float | None:
    seen = [own(look)[name] for look in run.looks]
    return sum(seen) / len(seen) if seen and all(each is not None for each in seen) else None


def _noise(run: Recorded) -> float | None:
    seen = [own(look)["signal_to_noise"] for look in run.looks]
    return math.exp(-sum(map(math.log, seen)) / len(seen)) if seen and all(seen) else None


def _setup(run: Recorded) -> tuple[str, ...]:
    if run.settings is None:
        return ()
    rate = f" @ {run.settings['learning_rate']}" if "learning_rate" in run.settings else ""
    others = {name: run.statement.get(name) for name in ("noise_multiplier", "releases")} | dict(run.settings)
    return run.statement["method"] + rate, str(sorted((k, str(v)) for k, v in others.items() if k != "seed"))


def _without(run: Recorded) -> float | None:
    name, pick = ("error", min) if "error" in run.last else ("accuracy", max)
    seen = [row[name] for row in run.without if name in row and math.isfinite(row["loss"])]
    return pick(seen, default=None)


def _unfound(run: Recorded) -> tuple[int, ...]:
    classes = [] if run.calibration is None else run.calibration["classes"]
    return tuple(each["label"] for each in classes if each["samples"] >= MANY and each["accuracy"] == 0)


def _spread(run: Recorded, runs: Sequence[Recorded]) -> float | None:
    """How unequally the run's method weighs samples, geometric mean over all looks; None where some are dropped."""
    method = run.method
    quantiles = [look["spread"]["quantiles"] for other in runs for look in other.looks]
    if method.split is not None or method.after is not None or not quantiles:
        return None
    short, long = (method.weigh(torch.tensor([q[k] for q in quantiles], dtype=torch.float64)) for k in ("5%", "95%"))
    ratio = float((short / long).log().mean().exp())
    return ratio if math.isfinite(ratio) else None


def _times(value: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
