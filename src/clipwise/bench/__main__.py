"""``python -m clipwise.bench``: the bench from the shell.

Receives: --rows, --columns, --rounds, --batch, --no-memory, --json, --device, --precisions, --methods.
Gives: the table on standard output, progress on standard error; exit 2 with one line where an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys

from clipwise.bench.cases import CASES
from clipwise.bench.columns import COLUMNS
from clipwise.bench.run import as_text, bench
from clipwise.types import InputError


def main(arguments: list[str] | None = None) -> int:
    """Run the bench and print the table."""
    parser = argparse.ArgumentParser(prog="python -m clipwise.bench", description="Time private training steps.")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help=f"of {', '.join(COLUMNS)}; default all")
    parser.add_argument("--rounds", type=int, default=11, help="timed steps per cell; default 11")
    parser.add_argument("--batch", type=int, help="batch size of every row; default each row's own")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "tf32"], help="on CUDA, of bf16, tf32, float32")
    parser.add_argument("--methods", nargs="+", default=[], help="methods to measure too, such as psac")
    parser.add_argument("--json", action="store_true", help="print every number, and why a cell is missing, as JSON")
    options = parser.parse_args(arguments)
    try:
        table = bench(
            options.rows,
            options.columns,
            rounds=options.rounds,
            memory=not options.no_memory,
            batch=options.batch,
            progress=lambda message: print(message, file=sys.stderr),
            device=options.device,
            precisions=options.precisions,
            methods=options.methods,
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(table.as_dict(), indent=2, ensure_ascii=False) if options.json else as_text(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
