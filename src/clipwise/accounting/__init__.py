"""Accounting: what a run's releases cost, as an upper bound on ε.

Receives: events, written by the function that drew the noise; δ; the name of an accountant.
Gives: epsilon and its inverse calibrate, the Ledger of a run, and as_dp_event, which says no to what has no proof.
"""

from clipwise.accounting.calibration import calibrate, epsilon
from clipwise.accounting.events import as_dp_event
from clipwise.accounting.ledger import Ledger

__all__ = ["Ledger", "as_dp_event", "calibrate", "epsilon"]
