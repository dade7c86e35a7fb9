"""Accounting: what a run's releases cost, as an upper bound on ε.

Receives: events, written by the function that drew the noise; δ; the name of an accountant.
Gives: epsilon and its inverse calibrate, the Ledger of a run, selection: the price of choosing among runs, dice: the
bounds of DiceSGD, and as_dp_event, which says no to what has no proof.
"""

from clipwise.accounting import dice
from clipwise.accounting.calibration import calibrate, epsilon
from clipwise.accounting.events import as_dp_event, spent
from clipwise.accounting.ledger import Ledger
from clipwise.accounting.selection import selection

__all__ = ["Ledger", "as_dp_event", "calibrate", "dice", "epsilon", "selection", "spent"]
