"""``clipwise report``: one page about finished runs.

Receives: ReportConfig.
Gives: report.html, report.json and plots in a folder; their paths and the answer, as text or JSON.
"""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from clipwise.cli.runs import new_folder
from clipwise.cli.screen import rendered
from clipwise.config import ReportConfig
from clipwise.plain import as_json
from clipwise.report import read, write_report
from clipwise.report.answer import in_numbers, told


def run(config: ReportConfig) -> str:
    """Read the runs and write the report; one folder's report goes into that folder unless another is named."""
    found = read(config.runs)
    folder = Path(config.folder or (config.runs[0] if len(config.runs) == 1 else new_folder("report")))
    page, numbers, *plots = write_report(found, folder, plots=True)
    answer = told(in_numbers(found))
    if config.json:
        places = {"report": str(page), "numbers": str(numbers), "plots": [str(plot) for plot in plots]}
        return as_json({**places, "runs": len(found), "answer": answer})
    drawn = f"plots for papers  {plots[0].parent}\n" if plots else ""  # a run that measured nothing has none
    return f"{rendered(Text(' '.join(answer)))}\nreport  {page}\nnumbers  {numbers}\n{drawn}"
