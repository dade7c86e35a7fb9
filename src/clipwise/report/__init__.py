"""What a run leaves behind: a folder, and a statement of its privacy.

Receives: a run's settings, ledger and measurements.
Gives: files that are whole or absent, and a statement for people and for programs.
"""

from clipwise.report.folder import RunFolder
from clipwise.report.statement import Statement

__all__ = ["RunFolder", "Statement"]
