"""The privacy statement of a run, for people and for programs.

Receives: the ledger and how the run was made.
Gives: Statement, as JSON values and as text.
"""

from __future__ import annotations

import platform
import textwrap
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from clipwise.accounting import Ledger
from clipwise.types import BlockGaussian, Gaussian, MemoryGaussian


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
    releases: int
    noise_multiplier: float
    discretisation: float
    generator: str
    method: str
    self_tested: bool
    fallbacks: tuple[str, ...]
    also_released: tuple[str, ...]  # what was released of the training data beside the steps, and is in ε
    entries: tuple[dict[str, Any], ...]  # every kind of release with its count
    refused: tuple[str, ...]
    excluded: tuple[str, ...]
    versions: dict[str, str]
    weights: str = "float32"  # the format of the trained parameters

    @classmethod
    def of(cls, ledger: Ledger, **known: Any) -> Statement:
        """The statement for everything in the ledger."""
        record = ledger.as_dict()
        events = dict.fromkeys(event for event, _ in ledger.entries)
        blocks, memory = (any(isinstance(e, kind) for e in events) for kind in (BlockGaussian, MemoryGaussian))
        return cls(
            epsilon=ledger.epsilon(known["delta"], known["accountant"]),
            relation=record["relation"],
            sampling=GROUPED if blocks else REMEMBERED if memory else "Poisson",
            releases=record["releases"],
            discretisation=record["discretisation"],
            also_released=tuple(e.what for e in events if isinstance(e, Gaussian)),
            entries=tuple(record["totals"]),
            refused=REFUSED,
            excluded=EXCLUDED,
            versions=versions(),
            **known,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def text(self) -> str:
        """A few lines for people."""
        seeded = "" if self.generator == "chacha20" else "  ← anyone with the seed can subtract this noise"
        releases = "1 release" if self.releases == 1 else f"{self.releases} releases"
        tested = "passed" if self.self_tested else "turned off"
        rate = f"{self.sampling_rate:.6g}" + (" over all samples" if self.sampling == GROUPED else "")
        wide = set(self.weights.split(", ")) <= {"float32", "float64"}
        rounded = [] if wide else [f"  weights      {self.weights}: small updates round away"]
        lines = [
            f"({self.epsilon:.4g}, {self.delta:g})-differentially private: {self.relation} of the training data.",
            f"  accountant   {self.accountant}, grid {self.discretisation:g}, {releases}",
            f"  sampling     {self.sampling}, rate {rate}, expected batch {self.expected_batch:g}",
            f"  noise        multiplier {self.noise_multiplier:.6g}, generator {self.generator}{seeded}",
            f"  method       {self.method}",
            *rounded,
            f"  self-test    {tested}",
            f"  by vmap      {', '.join(self.fallbacks) or 'nothing'}",
            f"  also in ε    {'; '.join(self.also_released) or 'nothing: the steps are all that was released'}",
            f"  refused      {'; '.join(self.refused)}",
            f"  not covered  {'; '.join(self.excluded)}",
            f"  versions     {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ]
        return "".join(f"{_wrapped(line)}\n" for line in lines)


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
EXCLUDED = (
    "choosing among runs by their results (clipwise compare prints the ε of all of them together; "
    "clipwise.accounting.selection prices a choice of which only the best run is ever seen)",
    "statistics of the training data used before training (normalisation, vocabulary), unless named above",
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
