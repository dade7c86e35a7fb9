"""Peak memory of one cell of the bench, in a process of its own.

Receives: a row, a column, a batch size and a number of threads, on the command line of a fresh process.
Gives: megabytes that the process grew by during three steps or a few more, above what it held before the first one.

The peak is the kernel's high-water mark of resident memory. On Linux it is read as VmHWM from /proc, not as
``getrusage``'s ru_maxrss, which a process inherits from the one that started it: beside a large parent every cell
would show the parent's size. Elsewhere it is ru_maxrss. The growth holds activations, gradients and whatever code the
first step loads (about 20 MB in every column), but not the model, the batch and the imports.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from clipwise.bench.cases import CASES
from clipwise.bench.columns import COLUMNS, builder

STEPS = 3  # some memory is first needed in the second step, when the gradients of the first still exist
_STATUS = Path("/proc/self/status")


def peak_megabytes(row: str, column: str, batch: int, threads: int) -> float | str:
    """The growth of a fresh process that takes the cell's step, or the last line that this process failed with."""
    script = "from clipwise.bench.memory import main; main()"
    command = [sys.executable, "-c", script, row, column, str(batch), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return float(done.stdout)


def main() -> None:
    """Take the step that the command line names, and print the growth."""
    warnings.simplefilter("ignore")  # peers warn about their own insides
    row, column, batch, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    step = builder(column, COLUMNS)(replace(CASES[row], batch=int(batch)))
    before = _resident("VmRSS")
    for _ in range(max(STEPS, step.warm_up + 1)):
        step()
    print(_resident("VmHWM") - before)


def _resident(field: str) -> float:
    """Megabytes of resident memory: now (VmRSS) or at most so far (VmHWM)."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines[field].split()[0]) / 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
