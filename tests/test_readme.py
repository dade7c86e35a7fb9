"""What the documentation shows runs: each Python block of the README and of some pages, and each file in examples/.

Receives: README.md, docs/ and examples/ of the repository.
Gives: the block or file that fails. Examples are run small: with CLIPWISE_QUICK=1, and --quick where they know it.
"""

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from clipwise.accounting import Ledger
from clipwise.cli import main
from clipwise.methods import METHODS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# but those that are given files: tests/test_hugging_face.py runs fine_tune.py
EXAMPLES = sorted({*(ROOT / "examples").glob("**/*.py")} - {ROOT / "examples/fine_tune.py"})


class Block(NamedTuple):
    heading: str
    line: int  # of its first line of code, from 1
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks, each with the heading that it stands under."""
    found, heading, start, language, code = [], "", None, "", []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and start is None:
            start, language, code = number + 1, fence[1], []
        elif fence and start is not None:
            found.append(Block(heading, start, language, "\n".join(code) + "\n"))
            start = None
        elif start is not None:
            code.append(line)
        elif line.startswith("#"):
            heading = line.strip("# ")
    assert start is None, f"the block that begins at line {start} never ends"
    return found


def python_of(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text()) if block.language in ("python", "py")] if page.exists() else []


def groups() -> list[list[Block]]:
    """Python blocks under one heading continue each other; another heading begins anew."""
    python = python_of(README)
    return [list(group) for _, group in groupby(python, key=lambda block: block.heading)]


def test_blocks_are_found_with_heading_line_and_language() -> None:
    text = "# A\n```python\nx = 1\n```\ntext\n```sh\nls\n```\n## B\n```python\ny = 2\nz = 3\n```\n"
    assert blocks(text) == [
        Block("A", 3, "python", "x = 1\n"),
        Block("A", 7, "sh", "ls\n"),
        Block("B", 11, "python", "y = 2\nz = 3\n"),
    ]


def test_there_is_a_readme_and_its_first_code_begins_before_line_25() -> None:
    assert README.exists(), "README.md is missing: write it, with a Python block before line 25"
    found = groups()
    assert found, "README.md shows no Python"
    assert found[0][0].line < 25, f"the first Python block begins at line {found[0][0].line}, expected before 25"


@pytest.mark.parametrize("group", groups(), ids=lambda group: group[0].heading)
def test_the_readme_s_blocks_run(group: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in group:
        # as many empty lines first as stand above the block, so that a traceback shows the README's line
        exec(compile("\n" * (block.line - 1) + block.code, str(README), "exec"), namespace)


@pytest.mark.parametrize("name", ["methods.md", "models.md"])
def test_the_blocks_of_a_page_run_one_after_another(name: str) -> None:
    page = ROOT / "docs" / name
    namespace: dict[str, object] = {"__name__": "page"}
    found = python_of(page)
    assert found
    with patch.dict(METHODS):
        for block in found:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


def test_the_page_on_methods_makes_a_command_that_knows_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = python_of(ROOT / "docs/methods.md")
    mine = "".join(block.code for block in page if block.heading in ("A method", "In the command"))
    np.savez("data.npz", x=np.random.RandomState(0).randn(100, 4), y=np.arange(100) % 2)
    few = "--noise-multiplier 1 --accountant rdp --delta 1e-3 --batch 20 --steps 2".split()
    methods = "flat; smooth(0.5); inner_momentum(smooth(0.5))"

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mine.py", *words])
        with patch.dict(METHODS), pytest.raises(SystemExit) as left:
            exec(compile(mine, "mine.py", "exec"), {"__name__": "__main__"})
        assert left.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    assert "smooth(0.5)" in run("compare", "--data", "npz:data.npz", "--methods", methods, "--folder", "c", *few)
    assert main(["report", "c"]) == 2 and "clipwise.METHODS[name] = its function" in capsys.readouterr().err
    assert "least biased" in (said := run("report", "c")) or "no difference in bias" in said
    assert "Smooth clipping" in Path("c/report.html").read_text()
    assert "smooth step" in run(
        "audit", "--method", "smooth", "--trials", "1500", "--canaries", "20", "--noise-seed", "1", "--quiet"
    )


def test_the_page_on_reports_compares_methods_on_a_network_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = python_of(ROOT / "docs/report.md")
    exec(compile("\n" * (block.line - 1) + block.code, "report.md", "exec"), {"__name__": "page"})
    assert main(["report", "runs/mine"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "least biased" in said or "no difference in bias" in said, said
    assert "does not rank the methods" not in said


def test_the_page_on_data_predicts_with_what_the_command_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text("age,income\n" + "20,low\n90,high\n" * 100)
    Path("new.csv").write_text("age,income\n" + "90,low\n20,low\n")
    data = "csv:people.csv?label=income:low|high&columns=age:18..100"
    steps = ["--epsilon", "8", "--steps", "30", "--batch", "100", "--noise-seed", "1", "--quiet"]
    assert main(["train", "--data", data, "--folder", "runs/mine", *steps]) == 0
    (block,) = (block for block in python_of(ROOT / "docs/data.md") if block.heading.startswith("Predicting"))
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.code, "docs/data.md", "exec"), namespace)
    assert namespace["found"].tolist() == [1, 0]


def test_the_page_on_resuming_goes_on_within_its_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 steps 6 were made and 4 kept: 8 are left, and all 14 count."""
    monkeypatch.chdir(tmp_path)
    (block,) = python_of(ROOT / "docs/resuming.md")
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.code, "docs/resuming.md", "exec"), namespace)
    private = namespace["private"]
    assert private.steps_taken == 8 and private.ledger.releases == 14
    assert 2.9 < private.epsilon() <= 3 and Ledger("ledger.jsonl").epsilon(1e-5) == private.epsilon()
    assert torch.load("checkpoint.pt", weights_only=True)["done"] == 12
    assert "8 steps, and 6 releases spent before" in private.statement().text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_run(path: Path, tmp_path: Path) -> None:
    quick = ["--quick"] if "--quick" in path.read_text() else []
    environment = {**os.environ, "CLIPWISE_QUICK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(path), *quick], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), f"{path.name} shows nothing"


def test_the_readme_s_table_names_every_method() -> None:
    from clipwise.methods import METHODS

    text = README.read_text()
    assert [name for name in METHODS if f"`{name}" not in text] == []


def test_the_readme_s_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", README.read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
