"""Audits: lower bounds on ε from attacks on the code as it runs, to be held against what it claims.

Receives: methods, or a run of your own with canaries.
Gives: Rows of a verdict, bounds with a stated confidence, checks of noise and sampling, membership inference.

To read in this order: bounds (from errors to ε), canaries (the attacks), white_box (steps and whole runs), one_run,
mechanics (noise and sampling), mia (membership inference), verdict (all of it for a list of methods).
"""

from clipwise.audit.bounds import Bound
from clipwise.audit.canaries import CANARIES, World, worlds
from clipwise.audit.mechanics import Check, mechanics
from clipwise.audit.mia import Roc, logistic_attack, roc, shadow_attack
from clipwise.audit.one_run import coins, one_run, watched
from clipwise.audit.verdict import AuditPlan, Verdict, audit, registered
from clipwise.audit.white_box import being_there, observe, taking_part, trajectories

__all__ = [
    "CANARIES",
    "AuditPlan",
    "Bound",
    "Check",
    "Roc",
    "Verdict",
    "World",
    "audit",
    "being_there",
    "coins",
    "logistic_attack",
    "mechanics",
    "observe",
    "one_run",
    "registered",
    "roc",
    "shadow_attack",
    "taking_part",
    "trajectories",
    "watched",
    "worlds",
]
