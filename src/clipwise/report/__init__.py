"""What a run leaves behind: a folder, a statement of its privacy, and one page for people about many runs.

Receives: a run's settings, ledger, measurements and diagnostics.
Gives: files that are whole or absent; Statement; write_report, which makes report.html, report.json and plots of runs.

To read in this order: statement and folder (one run), board (TensorBoard), runs (folders read back), figures (what is
shown), svg and plots (drawing it), answer (what it says), page (report.html), advice (advice.html).
"""

from clipwise.report.folder import RunFolder
from clipwise.report.page import write_report
from clipwise.report.runs import Recorded, epsilon_together, own, read
from clipwise.report.statement import Statement

__all__ = ["Recorded", "RunFolder", "Statement", "epsilon_together", "own", "read", "write_report"]
