"""The papers' figures and tables as experiments: TOML files, each with the paper's numbers and claims beside it.

Receives: an experiment's name, such as "paper4/table2", and a scale: small or full.
Gives: Experiment, the runs to make; descend, which trains without noise; measurements, verdicts on claims, plots.

To read in this order: experiment (the TOML), problem and noise_free (training without noise), measures (of a model),
claims (what the paper says of the measurements), results (measured beside paper), plot.
"""

from clipwise.experiments.claims import holds
from clipwise.experiments.experiment import Claim, Experiment, Planned, known, read
from clipwise.experiments.noise_free import descend
from clipwise.experiments.results import Result, averaged, compared

__all__ = ["Claim", "Experiment", "Planned", "Result", "averaged", "compared", "descend", "holds", "known", "read"]
