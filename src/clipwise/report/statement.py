"""The privacy statement of a run, for people and for programs.

Receives: the ledger and how the run was made.
Gives: Statement, as JSON values and as text.
"""

from __future__ import annotations

import math
import platform
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from clipwise.accounting import Ledger
from clipwise.accounting.events import discretisation, relation
from clipwise.accounting.ledger import listed, totals
from clipwise.plain import no_less, rounded_up
from clipwise.types import BlockGaussian, Event, MemoryGaussian


@dataclass(frozen=True)
class Statement:
    """What was guaranteed, and under which conditions."""

    epsilon: float
    delta: float
    accountant: str
    relation: str
    sampling: str
    sampling_rate: float
    expected_batch: float
    releases: int  # all that are in ε: this run's steps and what was spent before
    steps: int
    noise_multiplier: float
    discretisation: float | None  # of the accountant's grid, where it has one
    generator: str
    method: str
    self_tested: bool
    fallbacks: tuple[str, ...]
    entries: tuple[dict[str, Any], ...]  # every kind of step with its count
    spent_before: tuple[dict[str, Any], ...]  # the same of what was released before this run, and is in ε
    refused: tuple[str, ...]
    excluded: tuple[str, ...]
    versions: dict[str, str]
    rows_per_person: int = 1  # how many samples ε holds for together
    weights: str = "float32"  # the format of the trained parameters
    model: str = ""  # SHA-256 of the file that holds them, where there is one
    made: str = ""  # the day on which it was written, UTC

    @classmethod
    def of(cls, ledger: Ledger, *, earlier: Iterable[tuple[Event, int]] = (), **known: Any) -> Statement:
        """The statement for everything in the ledger; ``earlier`` is what it held before the run's first step."""
        before = totals(earlier)
        own = totals(ledger.entries) - before
        rows = known.get("rows_per_person", 1)
        blocks, memory = (any(isinstance(e, kind) for e in own) for kind in (BlockGaussian, MemoryGaussian))
        return cls(
            epsilon=ledger.epsilon(known["delta"], known["accountant"], rows_per_person=rows),
            relation=relation(rows),
            sampling=GROUPED if blocks else REMEMBERED if memory else "Poisson",
            releases=ledger.releases,
            steps=own.total(),
            discretisation=(
                discretisation(ledger.entries, rows_per_person=rows) if known["accountant"] == "pld" else None
            ),
            entries=tuple(listed(own.items())),
            spent_before=tuple(listed(before.items())),
            refused=REFUSED,
            excluded=(TOGETHER if rows == 1 else f"a person with more than {rows} samples", *EXCLUDED),
            versions=versions(),
            **known,
        )

    def __str__(self) -> str:
        """What ``print`` shows: the lines for people, not all fields in one."""
        return self.text()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def seeded(self) -> bool:
        """Whether the noise came from a seed, which is for tests."""
        return self.generator.startswith("seeded")

    def text(self) -> str:
        """A few lines for people."""
        seeded = "  ← anyone with the seed can subtract this noise" if self.seeded else ""
        grid = "" if self.discretisation is None else f", grid {self.discretisation:g}"
        samples = round(self.expected_batch / self.sampling_rate)  # the rate is batch/samples
        large = "" if self.delta < 1 / samples else "  ← not below 1/samples: it would allow a sample's publication"
        whom = "one sample" if self.rows_per_person == 1 else "one person"
        tested = "passed" if self.self_tested else "turned off"
        rate = f"{self.sampling_rate:.6g}" + (" over all samples" if self.sampling == GROUPED else "")
        wide = set(self.weights.split(", ")) <= {"float32", "float64"}
        rounded = [] if wide else [f"  weights      {self.weights}: small updates round away"]
        plain = [each["event"] for each in self.entries] in ([], ["poisson_gaussian"])  # the lines above say it all
        steps = [] if plain else [f"  steps        {'; '.join(map(_said, self.entries))}"]
        model = [f"  model        model.pt of {self.made}, SHA-256 {self.model}"] if self.model else []
        before = "; ".join(map(_said, self.spent_before)) or "nothing: the steps are all that was released"
        spent = rounded_up(self.epsilon)
        times = f" = {rounded_up(math.exp(float(spent)))}" if self.epsilon < 14 else ""  # a million says no more
        lines = [
            f"({spent}, {no_less(self.delta)})-differentially private: {self.relation} of the training data.",
            f"  meaning      whatever follows from the releases is at most e^{spent}{times} times as likely with any "
            f"{whom} as without, and the reverse, plus a probability of {no_less(self.delta)}{large}",
            f"  accountant   {self.accountant}{grid}, {counted(self.as_dict())}",
            f"  sampling     {self.sampling}, rate {rate}, expected batch {self.expected_batch:g} of {samples} samples",
            f"  noise        multiplier {self.noise_multiplier:.6g}, generator {self.generator}{seeded}",
            *steps,
            f"  method       {self.method}",
            *model,
            *rounded,
            f"  self-test    {tested}",
            f"  by vmap      {', '.join(self.fallbacks) or 'nothing'}",
            f"  also in ε    {before}",
            f"  refused      {'; '.join(self.refused)}",
            f"  not covered  {'; '.join(self.excluded)}",
            f"  versions     {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ]
        return "".join(f"{_wrapped(line)}\n" for line in lines)


def counted(stated: Mapping[str, Any]) -> str:
    """How many releases a statement's values speak of, and for whom its ε holds, if not for one sample.

    This run's steps, and apart from them what was spent before.
    """
    steps = stated.get("steps", stated["releases"])
    before = stated["releases"] - steps
    spent = f", and {_many(before, 'release')} spent before" if before else ""
    return _many(steps, "step") + spent + for_whom(stated.get("rows_per_person", 1))


def for_whom(rows: int) -> str:
    """What is added to an ε that holds for all of a person's samples; nothing to one that is for one sample."""
    return f", for a person with at most {rows} samples" if rows > 1 else ""


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _said(entry: Mapping[str, Any]) -> str:
    """One kind of release, with all that its cost is made of."""
    kind = {
        "gaussian": "{what}, of all samples",
        "poisson_gaussian": "Poisson, rate {sampling_rate:.6g}",
        "memory_gaussian": "Poisson, rate {sampling_rate:.6g}, with hidden memory {memory:.6g}",
        "block_gaussian": "a block begun, rate {sampling_rate:.6g}" if entry.get("begins") else "within a block",
    }[entry["event"]]
    return f"{entry['count']} × {kind.format(**entry)}, multiplier {entry['noise_multiplier']:.6g}"


def _wrapped(line: str) -> str:
    """The line for a terminal, what does not fit below its beginning."""
    indent = (15 if line.startswith(" ") else 2) * " "
    return textwrap.fill(line, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


GROUPED = "Poisson within fixed groups, one group per step; a sample's group is its number modulo their count"
REMEMBERED = "Poisson, with hidden memory of earlier draws"
# What a run stops at, so that a statement is never made of it.
REFUSED = (
    "batches that are not Poisson draws",
    "modules that mix rows of a batch",
    "steps without noise",
    "releases without a proof",
)
TOGETHER = (
    "several samples together, such as all rows of a person who stands in more than one: ε is for one sample, unless "
    "rows_per_person says otherwise"
)
EXCLUDED = (
    "choosing among runs by their results (clipwise compare prints the ε of all of them together; "
    "clipwise.accounting.selection prices a choice of which only the best run is ever seen)",
    "statistics of the training data used before training (normalisation, vocabulary, class weights), unless named "
    "above",
    "other releases from the same data, unless they were given as spent",
    "diagnostics and metrics that were measured on training rows, which the run's folder may hold",
    "the evaluation data",
)


def versions() -> dict[str, str]:
    """What the run was made with."""
    names = ("clipwise", "torch", "numpy", "scipy", "dp-accounting", "cryptography")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
