"""Audits: lower bounds on ε from attacks on the code as it runs, to be held against what it claims.

Receives: methods, or a run of your own with canaries.
Gives: Rows of a verdict, bounds with a stated confidence, checks of noise and sampling, membership inference.

To read in this order: bounds (from errors to ε), canaries (the attacks), white_box (steps and whole runs), one_run,
mechanics (noise and sampling), mia (membership inference), verdict (all of it for a list of methods).
"""

from clipwise.audit.bounds import Bound
from clipwise.audit.canaries import CANARIES
from clipwise.audit.mechanics import Check, mechanics
from clipwise.audit.mia import Roc, logistic_attack, shadow_attack
from clipwise.audit.one_run import coins, one_run, watched
from clipwise.audit.verdict import AuditPlan, Verdict, audit, registered

__all__ = [
    "CANARIES",
    "AuditPlan",
    "Bound",
    "Check",
    "Roc",
    "Verdict",
    "audit",
    "coins",
    "logistic_attack",
    "mechanics",
    "one_run",
    "registered",
    "shadow_attack",
    "watched",
]
