"""The privacy statement of a run, for people and for programs.

Receives: the ledger and how the run was made.
Gives: Statement, as JSON values and as text.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from clipwise.accounting import Ledger


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
    excluded: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, ledger: Ledger, **known: Any) -> Statement:
        """The statement for everything in the ledger."""
        record = ledger.as_dict()
        return cls(
            epsilon=ledger.epsilon(known["delta"], known["accountant"]),
            relation=record["relation"],
            sampling="Poisson",
            releases=record["releases"],
            discretisation=record["discretisation"],
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
        lines = [
            f"({self.epsilon:.4g}, {self.delta:g})-differentially private: {self.relation} of the training data.",
            f"  accountant   {self.accountant}, grid {self.discretisation:g}, {releases}",
            f"  sampling     {self.sampling}, rate {self.sampling_rate:.6g}, expected batch {self.expected_batch:g}",
            f"  noise        multiplier {self.noise_multiplier:.6g}, generator {self.generator}{seeded}",
            f"  method       {self.method}",
            f"  self-test    {tested}",
            f"  by vmap      {', '.join(self.fallbacks) or 'nothing'}",
            f"  not covered  {'; '.join(self.excluded)}",
            f"  versions     {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ]
        return "\n".join(lines) + "\n"


EXCLUDED = (
    "choosing hyper-parameters by looking at results on the training data",
    "statistics of the training data used before training (normalisation, vocabulary)",
    "the evaluation data",
)


def versions() -> dict[str, str]:
    """What the run was made with."""
    names = ("clipwise", "torch", "numpy", "dp-accounting")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
