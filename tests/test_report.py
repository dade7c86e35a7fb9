"""The report against the numbers that runs recorded: table, answer, curves, JSON, plots, TensorBoard, live progress.

Receives: small runs of the command, made once.
Gives: that whatever the page shows is what the folders hold; ``test_report_browser`` opens the same page.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clipwise import cross_entropy, train
from clipwise.accounting import Ledger, spent
from clipwise.cli import main
from clipwise.cli.parts import spent_before
from clipwise.cli.screen import _measured
from clipwise.plain import rounded_up
from clipwise.report import epsilon_together, read
from clipwise.report.answer import alarms, answer, in_numbers, ranking, refuted
from clipwise.report.figures import Axis, Figure, Line, Panel, Rank, figures
from clipwise.report.look import _DARK, _LIGHT, HUES
from clipwise.report.page import document, page
from clipwise.report.plots import plotted
from clipwise.report.svg import _apart, formatted, share, ticks
from clipwise.types import InputError

FAST = ["--noise-multiplier", "1", "--accountant", "rdp", "--batch", "20", "--delta", "1e-3", "--threads", "1"]
FAST += ["--noise-seed", "0", "--no-self-test", "--quiet"]  # seeded: which methods come out alike must not be chance
METHODS = "flat(0.5); psac(0.5); normalised; global_(2.0); adaptive; layerwise"
DICE = "dice(flat(1.0), memory='none')"


def data(folder: Path, task: str = "") -> str:
    """Clouds around three corners, or a number to guess, as a file; some samples are far off, so that norms differ."""
    draw = np.random.RandomState(0)
    y = draw.randint(0, 3, 120)
    x = 2 * np.eye(4)[y] + draw.randn(120, 4) * draw.choice([0.3, 3.0], (120, 1))
    target = x[:, 0].clip(-1, 1) if task else y
    np.savez(folder / f"data{task}.npz", x=x.astype("float32"), y=target.astype("float32" if task else "int64"))
    return f"npz:{folder / f'data{task}.npz'}" + (f"?task={task}" if task else "")


def comparison(base: Path) -> Path:
    """One comparison of six methods, made once for all tests of a process."""
    folder = base / "compared"
    if not folder.exists():
        words = ["compare", "--data", data(base), "--model", "mlp(hidden=8)", "--methods", METHODS]
        assert main([*words, *FAST, "--steps", "6", "--evaluate-every", "2", "--folder", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def compared(base: Path) -> Path:
    return comparison(base)


@pytest.fixture(scope="module")
def others(base: Path) -> Path:
    """Runs of other kinds: a number to guess, hidden feedback, and one that nobody looked into."""
    folder = base / "others"
    if not folder.exists():
        short = ["--model", "mlp(hidden=8)", "--steps", "2", "--evaluate-every", "1", *FAST]
        for name, words in {
            "regression": ["--data", data(base, "regression"), "--diagnose-every", "1"],
            "dice": ["--data", data(base), "--method", DICE, "--diagnose-every", "1"],
            "plain": ["--data", data(base), "--diagnose-every", "0"],
        }.items():
            assert main(["train", *words, *short, "--folder", str(folder / name)]) == 0
    return folder


def lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.read_text().splitlines()]


class Read(HTMLParser):
    """A page's first table as rows of (value, text), its visible text, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[list[tuple[str | None, str]]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text, self._skip, self._in, self._small = "", 0, False, False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._skip += tag in ("style", "script")
        self._small = tag == "small" or (self._small and tag == "wbr")
        if tag == "table":
            self._in = known.get("id") == "runs"
        if self._in and tag == "tr":
            self.cells.append([])
        if self._in and tag in ("td", "th"):
            self.cells[-1].append((known.get("data-v"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._skip -= tag in ("style", "script")
        self._small = self._small and tag != "small"
        self._in = self._in and tag != "table"

    def handle_data(self, text: str) -> None:
        if self._skip:
            return
        self.text += text
        if self._in and self.cells and self.cells[-1] and not self._small:
            value, before = self.cells[-1][-1]
            self.cells[-1][-1] = (value, before + text)

    def column(self, title: str) -> dict[str, tuple[str | None, str]]:
        """Name of the run → what its cell holds."""
        place = [text for _, text in self.cells[0]].index(title)
        return {row[0][1]: row[place] for row in self.cells[1:]}


# what is shown is what was recorded


def test_every_number_of_the_table_is_the_recorded_one(compared: Path) -> None:
    shown = Read((compared / "report.html").read_text())
    folders = sorted(place.parent for place in compared.glob("*/statement.json"))
    names = [folder.name.partition("-")[2] for folder in folders]
    assert [row[0][1] for row in shown.cells[1:]] == names
    looks = {name: lines(folder / "diagnostics.jsonl") for name, folder in zip(names, folders, strict=True)}
    every = [look for each in looks.values() for look in each]
    for name, folder in zip(names, folders, strict=True):
        stated = json.loads((folder / "statement.json").read_text())
        own = [next(iter(look["methods"].values())) for look in looks[name]]
        same = [look["methods"].get(stated["method"]) for look in every]
        expected = {
            "accuracy": (lines(folder / "metrics.jsonl")[-1]["accuracy"], "{:.1%}"),
            "ε": (stated["epsilon"], None),
            "own bias": (np.mean([look["direction_error"] for look in own]), "{:.1%}"),
            "noise": (math.exp(np.mean([-math.log(look["signal_to_noise"]) for look in own])), "{:.2f}"),
            "alignment": (np.mean([look["alignment"] for look in own]), "{:.3f}"),
            "clipped": (np.mean([look["clipped"] for look in own]), "{:.0%}"),
            "ECE": (json.loads((folder / "calibration.json").read_text())["ece"], "{:.1%}"),
        }
        if (
            name != "adaptive"
        ):  # which has another clip norm at every look, so that nobody knows what it would have done
            expected["bias"] = (np.mean([each["direction_error"] for each in same]), "{:.1%}")
        for title, (value, form) in expected.items():
            kept, text = shown.column(title)[name]
            assert float(kept or "nan") == pytest.approx(value, rel=1e-12), (name, title)
            assert text == (form.format(value) if form else rounded_up(value)), (name, title)
    assert shown.column("bias")["adaptive"] == ("", "–")


def test_bold_is_the_best_of_its_column(compared: Path) -> None:
    text = (compared / "report.html").read_text()
    runs = json.loads((compared / "report.json").read_text())["runs"]
    for title, best, form in (
        ("accuracy", max, "{:.1%}"), ("same_bias", min, "{:.1%}"), ("noise", min, "{:.2f}"),
        ("alignment", max, "{:.3f}"), ("ece", min, "{:.1%}"),
    ):  # fmt: skip
        known = [run[title] for run in runs if run[title] is not None]
        top = {value for value in known if form.format(value) == form.format(best(known))}
        for value in known:
            bold = f'class="num best" data-v="{value!r}"' in text
            assert bold == (value in top and top != set(known)), title


def test_the_answer_names_who_is_least_and_most_biased_on_the_same_gradients(compared: Path) -> None:
    found = in_numbers(read([compared]))
    known = {row.name: row.same_bias for row in found if row.same_bias is not None}
    least, most = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    first = answer(found)[0]
    assert first.startswith(f"*{least}* is the least biased: {known[least]:.0%} of its clipped mean gradient")
    assert f"The most biased is *{most}* with {known[most]:.0%}." in first
    near = {name for name, value in known.items() if value < known[least] + 0.05} - {least, most}
    assert set(re.findall(r"\*(\w+)\* \(\d+%\)", first)) == near
    shown = Read((compared / "report.html").read_text()).text
    assert first.replace("*", "") in shown
    top = f"{max(row.accuracy or 0 for row in found):.1%}"
    first = [row for row in found if f"{row.accuracy:.1%}" == top]
    if len(first) == 1:
        assert f"{first[0].name}’s: {top}" in shown
    elif len(first) < len(found):
        assert re.search(rf"that of [^:]*\b{first[0].name}\b[^:]*, with no difference between them: {top}", shown)
    else:
        assert f"There is no difference in accuracy: {top}" in shown


def test_the_reason_is_how_unequally_samples_are_weighed(compared: Path) -> None:
    found = {row.name: row for row in in_numbers(read([compared]))}
    quantiles = [look["spread"]["quantiles"] for run in read([compared]) for look in run.looks]
    # C/n: the ratio of two weights is the ratio of the norms, the other way round
    expected = np.exp(np.mean([np.log(q["95%"] / q["5%"]) for q in quantiles]))
    assert found["normalised"].spread == pytest.approx(expected, rel=1e-9)
    assert found["layerwise"].spread is None, "layer by layer there is no one norm"
    level = replace(found["flat"], spread=1.0, same_bias=0.0), replace(found["psac"], spread=4.4, same_bias=0.2)
    said = "With *flat* a short gradient weighs as much as a long one, with *psac* 4.4 times; unclipped, all weigh"
    assert said in answer(level)[1]


def test_runs_of_the_same_settings_but_the_seed_are_said_with_their_mean_and_deviation(compared: Path) -> None:
    flat, psac, *_ = in_numbers(read([compared]))
    assert flat.setup and flat.setup != psac.setup
    told = " ".join(answer([flat, psac]))
    assert "One run each: small differences are chance." in told
    three = [replace(flat, accuracy=value, baseline=0.1) for value in (0.7, 0.8, 0.9)]
    told = " ".join(answer([*three, psac]))
    assert f"with the same settings: {flat.setup[0]} 80.0% ± 10.0% (3 runs)." in told and "One run each" not in told
    alone = [replace(row, setup=()) for row in three]  # of a program, which does not say its settings
    assert "One run each" in " ".join(answer(alone))


def test_where_no_accuracy_is_above_the_baseline_the_best_is_that_of_the_highest_roc_auc(compared: Path) -> None:
    flat, psac, *_ = in_numbers(read([compared]))
    rare = [
        replace(flat, accuracy=0.94, baseline=0.94, roc_auc=0.61),
        replace(psac, accuracy=0.93, baseline=0.94, roc_auc=0.72),
    ]
    assert "The highest ROC AUC is *psac*’s: 0.720 at ε" in " ".join(answer(rare)).replace(" also", "")
    better = [rare[0], replace(rare[1], accuracy=0.95)]
    assert "The most accurate model is *psac*’s: 95.0%" in " ".join(answer(better)).replace(" also", "")


@pytest.mark.parametrize(("few", "many", "named"), [(0.184, 0.186, False), (0.2, 0.6, True), (0.0, 0.6, True)])
def test_the_share_that_is_shortened_is_a_reason_only_where_it_differs(
    compared: Path, few: float, many: float, named: bool
) -> None:
    flat, psac, *_ = in_numbers(read([compared]))
    pair = [
        replace(row, spread=None, same_bias=bias, same_clipped=share, clipped=0.5)
        for row, bias, share in ((flat, 0.1, few), (psac, 0.3, many))
    ]
    said = " ".join(answer(pair))
    assert (f"It shortens {few:.0%} of them, *psac* {many:.0%}" in said) == named
    assert ("“Where the bias comes from” shows" in said) != named


def test_every_curve_is_the_recorded_one(compared: Path) -> None:
    runs = read([compared])
    shown = {figure.key: figure for figure in figures(runs)}
    for key, x, y, part in (
        ("quality", "epsilon", "accuracy", "metrics"),
        ("bias", "step", "direction_error", "looks"),
        ("alignment", "step", "alignment", "looks"),
    ):
        for run, line in zip(runs, shown[key].panels[0].marks, strict=True):
            assert isinstance(line, Line) and line.name == run.name
            recorded = getattr(run, part)
            values = [row[y] if part == "metrics" else next(iter(row["methods"].values()))[y] for row in recorded]
            assert line.x == tuple(row[x] for row in recorded) and line.y == tuple(values)
    (rank,) = shown["same-gradients"].panels[0].marks
    assert isinstance(rank, Rank) and list(rank.values) == sorted(rank.values) and "adaptive" not in rank.names
    assert "adaptive" in shown["same-gradients"].caption
    assert shown["kept"].caption.endswith("Not here: layerwise, which clips layer by layer.")
    for run, panel in zip(runs, shown["reliability"].panels, strict=True):
        assert run.calibration is not None
        assert panel.marks[0].heights == tuple(  # type: ignore[union-attr]
            each["accuracy"] if each["samples"] else 0.0 for each in run.calibration["bins"]
        )


def test_a_point_is_drawn_where_its_value_is(compared: Path) -> None:
    text = (compared / "report.html").read_text()
    chart = text[text.index('<figure id="bias"') :].partition("</figure>")[0]
    run = read([compared])[0]
    drawn = re.search(r'data-run="0"[^>]*>(.*?)</g>', chart)
    assert drawn is not None
    heights = [float(y) for y in re.findall(r'<circle cx="[^"]+" cy="([^"]+)"', drawn[1])]
    values = [next(iter(look["methods"].values()))["direction_error"] for look in run.looks]
    marks = [(float(y), float(t) / 100) for y, t in re.findall(r'y="([\d.]+)" class="tick end">(\d+)%<', chart)]
    (low_y, low), (high_y, high) = min(marks, key=lambda m: m[1]), max(marks, key=lambda m: m[1])
    assert len(heights) == len(values) > 2 and high > low
    for height, value in zip(heights, values, strict=True):
        place = low_y + (value - low) / (high - low) * (high_y - low_y) - 4.5  # a tick's text stands 4.5 below its line
        assert height == pytest.approx(place, abs=0.3)


def test_the_json_holds_what_the_page_shows_and_no_nan(compared: Path) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"JSON has no {text}")

    values = json.loads((compared / "report.json").read_text(), parse_constant=refuse)
    assert values["not_private"] is True and "no ε covers" in values["note"]
    for run, found in zip(read([compared]), values["runs"], strict=True):
        assert found["statement"] == json.loads((run.path / "statement.json").read_text())
        assert found["metrics"] == list(run.metrics) and found["name"] == run.name
    assert [each["key"] for each in values["figures"]] == [figure.key for figure in figures(read([compared]))]
    assert {name for each in values["citations"] for name in each["methods"]} >= {"flat", "psac", "layerwise"}


def test_citations_are_of_the_methods_and_of_those_they_wrap(others: Path) -> None:
    text = page(*[(runs := read([others / "dice"])), figures(runs)])
    assert (
        "Differentially Private SGD Without Clipping Bias" in text and "Deep Learning with Differential Privacy" in text
    )


def test_epsilon_of_all_runs_is_that_of_all_ledgers_as_one(compared: Path) -> None:
    runs = read([compared])
    entries = [entry for run in runs for entry in Ledger(run.path / "ledger.jsonl").entries]
    together = spent(entries, 1e-3, "rdp")
    assert epsilon_together(runs) == together > max(run.statement["epsilon"] for run in runs)
    assert rounded_up(together) in Read((compared / "report.html").read_text()).text


def test_a_run_whose_ledger_is_short_is_refused(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "1-flat", tmp_path / "run")
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds 0 releases, expected the 6 of the statement: restore"):
        read([tmp_path / "run"])


def test_a_run_with_the_ledger_of_another_is_refused_also_as_what_was_spent(compared: Path, tmp_path: Path) -> None:
    """As many releases, each of them cheaper: the ε of all runs together would be too small."""
    place = shutil.copytree(compared / "1-flat", tmp_path / "run")
    own = Ledger(place / "ledger.jsonl").entries
    (place / "ledger.jsonl").unlink()
    with Ledger(place / "ledger.jsonl") as other:
        other.extend((replace(event, noise_multiplier=100.0), count) for event, count in own)
    for use in (lambda: read([place]), lambda: spent_before([str(place)])):
        with pytest.raises(ValueError, match="lacks 6 releases that the statement names"):
            use()


@pytest.mark.parametrize("text", ["{", "[1]", '{"entries": [{"event": "poisson"}]}'])
def test_a_statement_that_cannot_be_read_beside_what_was_spent_is_an_error_of_one_line(
    compared: Path, tmp_path: Path, text: str
) -> None:
    place = shutil.copytree(compared / "1-flat", tmp_path / "run")
    (place / "statement.json").write_text(text)
    with pytest.raises(InputError, match=r"statement\.json is not as clipwise writes it .*: restore it"):
        spent_before([str(place)])


def test_a_statement_that_says_less_than_its_ledger_costs_is_refused(compared: Path, tmp_path: Path) -> None:
    place = shutil.copytree(compared / "1-flat", tmp_path / "run") / "statement.json"
    stated = json.loads(place.read_text())
    place.write_text(json.dumps(stated | {"epsilon": stated["epsilon"] / 2}))
    with pytest.raises(ValueError, match=r"cost ε = .*, and its statement says .*: restore the run's statement\.json"):
        read([place.parent])


def test_nothing_is_fetched_from_anywhere(compared: Path) -> None:
    shown = Read((compared / "report.html").read_text())
    assert not [each for each in shown.attributes if each[1] in ("src", "srcset", "action", "data", "poster")]
    assert all((value or "").startswith("#") for _, name, value in shown.attributes if name == "href")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|<link", (compared / "report.html").read_text())


# runs that diverged, and runs that are alike


@pytest.fixture(scope="module")
def diverged(base: Path) -> Path:
    """A comparison of which one run is without finite numbers from its first step on."""
    folder = base / "diverged"
    if not folder.exists():
        methods = "flat(0.5); psac(1e6) @ 1e38; normalised"
        words = ["compare", "--data", data(base), "--model", "mlp(hidden=8)", "--methods", methods]
        assert main([*words, *FAST, "--steps", "6", "--evaluate-every", "2", "--folder", str(folder)]) == 0
    return folder


def test_a_run_that_diverged_is_in_no_mean_and_in_no_ranking(diverged: Path) -> None:
    runs = read([diverged])
    found = {row.name: row for row in in_numbers(runs)}
    assert [row.diverged for row in found.values()] == [None, 2, None]
    looks = [look for run in diverged.glob("*/diagnostics.jsonl") for look in lines(run)]
    finite = [look["methods"]["flat(clip_norm=0.5)"] for look in looks if look["non_finite"] < look["samples"]]
    assert len(finite) == 9 < len(looks) == 12, "psac saw one finite look, before its first step"
    assert found["flat"].same_bias == pytest.approx(np.mean([each["direction_error"] for each in finite]))
    assert found["psac"].same_bias is None and len(runs[1].looks) == 1
    shown = Read(text := page(runs, figures(runs)))
    assert "psac had diverged at step 2: its loss or gradients were not finite" in shown.text
    assert "psac(clip_norm=1000000.0, r=0.1) · diverged at step 2" in shown.text
    assert text.index("psac had diverged") < text.index("The answer")
    line = text[text.index('<tr data-run="1">') :].partition("</tr>")[0]
    assert " best" not in line
    assert "psac" not in answer(list(found.values()))[0] and "psac" in ranking(list(found.values()))
    assert "Not ranked: psac, which diverged." in ranking(list(found.values()))
    by_key = {figure.key: figure for figure in figures(runs)}
    assert "Not here: psac, which diverged." in by_key["same-gradients"].caption
    assert by_key["same-gradients"].panels[0].marks[0].names in (("flat", "normalised"), ("normalised", "flat"))  # type: ignore[union-attr]


def test_compare_says_who_diverged_and_gives_it_no_bias_in_the_end(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--data", data(base), "--model", "mlp(hidden=8)", "--methods", "flat; psac(1e6) @ 1e38", *FAST]
    assert main([*words, "--steps", "2", "--folder", str(tmp_path / "runs"), "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning: psac had diverged at step 1" in shown.err
    flat, psac = json.loads(shown.out)["runs"]
    assert flat["diverged"] is None and flat["bias"] > 0
    assert psac["diverged"] == 1 and psac["bias"] is None and psac["clipped"] is None and not psac["best"]
    assert answer(in_numbers(read([tmp_path / "runs"])))[0].startswith("*flat* reached")
    assert answer(in_numbers(read([tmp_path / "runs"]))[1:] * 2) == ["Every run diverged, so there is nothing to rank."]


def test_what_prints_alike_is_no_difference(compared: Path) -> None:
    flat, psac, normalised, *_ = in_numbers(read([compared]))
    flat, psac = (replace(row, same_bias=bias) for row, bias in ((flat, 0.0632), (psac, 0.0628)))
    alike = [replace(row, accuracy=0.6741, alignment=0.4, noise=2.0) for row in (flat, psac)]
    said = " ".join(answer(alike))
    assert said.startswith("There is no difference in bias between *psac* and *flat*: 6% of the clipped mean gradient")
    assert "There is no difference in accuracy: 67.4%" in said
    assert not re.search("least|most|best", said.replace("the most frequent class", ""))
    assert ranking(alike) == "On the same gradients, no difference in bias: psac 6.3%, flat 6.3%."
    third = replace(normalised, same_bias=0.2, accuracy=0.5)
    said = " ".join(answer([*alike, third]))
    assert said.startswith("*psac* and *flat* are the least biased: 6% of the clipped mean gradient points away")
    assert "The most biased is *normalised* with 20%." in said
    assert "The most accurate model is that of *flat* and *psac*, with no difference between them: 67.4%." in said


# other kinds of runs


def test_a_single_run_is_told_without_a_ranking(compared: Path, tmp_path: Path) -> None:
    runs = read([compared / "2-psac"])
    text = Read(page(runs, figures(runs))).text
    (row,) = in_numbers(runs)
    assert f"psac reached {row.accuracy:.1%} accuracy at ε = {rounded_up(row.epsilon)}" in text
    assert "least biased" not in text and "on the same gradients" not in text
    assert "A private run with psac on data" in text
    assert "What clipping does" in text and "Why methods differ" not in text


def test_a_class_that_is_never_found_is_said_though_the_accuracy_is_good(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "1-flat", tmp_path / "run")
    place = tmp_path / "run" / "calibration.json"
    known = json.loads(place.read_text())
    first, second, *_ = known["classes"]
    assert alarms(in_numbers(read([tmp_path / "run"]))) == []
    for samples, said in ((9, []), (10, ["flat finds no evaluation sample of the class 1, counted from 0, which the"])):
        second.update(samples=samples, accuracy=0.0)
        place.write_text(json.dumps(known))
        found = alarms(in_numbers(read([tmp_path / "run"])))
        assert [text[: len(said[0])] for text in found] == said
    first.update(samples=50, accuracy=0.0)
    place.write_text(json.dumps(known))
    (row,) = in_numbers(read([tmp_path / "run"]))
    assert "of the classes 0, 1, counted from 0" in alarms([row])[0]
    (text,) = alarms([replace(row, accuracy=row.baseline)])  # then that is what there is to say
    assert "no better than always saying" in text


def test_runs_that_nobody_looked_into_have_quality_privacy_and_calibration(others: Path, compared: Path) -> None:
    runs = read([others / "plain"])
    text = page(runs, figures(runs))
    assert [figure.key for figure in figures(runs)] == ["quality", "reliability"]
    assert [text for _, text in Read(text).cells[0]] == ["method", "accuracy", "ε", "ECE"]
    mixed = read([others / "plain", compared / "2-psac"])
    shown = Read(page(mixed, figures(mixed)))
    assert shown.column("own bias")["flat"] == ("", "–") and "least biased" not in shown.text


def test_a_run_that_measured_nothing_still_has_its_privacy(others: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(others / "plain", tmp_path / name)
        for gone in ("metrics.jsonl", "calibration.json", "settings.toml"):
            (tmp_path / name / gone).unlink()
    runs = read([tmp_path / "a", tmp_path / "b"])
    text = Read(page(runs, figures(runs))).text
    assert "Nothing was measured of these runs but their privacy." in text
    assert f"ε = {rounded_up(runs[0].statement['epsilon'])}" in text


def test_a_regression_shows_its_error_and_less_is_better(others: Path, tmp_path: Path) -> None:
    worse = tmp_path / "worse"
    shutil.copytree(others / "regression", worse)
    measured = lines(worse / "metrics.jsonl")
    measured[-1]["error"] *= 2
    (worse / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
    runs = read([worse, others / "regression"])
    shown = Read(text := page(runs, figures(runs)))
    error = lines(others / "regression" / "metrics.jsonl")[-1]["error"]
    assert f'class="num best" data-v="{error!r}"' in text and "accuracy" not in [t for _, t in shown.cells[0]]
    assert f"The least error is flat regression’s: {error:.4g}" in shown.text.replace("also ", "")
    assert "Error for the privacy spent" in shown.text and "; down is better." in shown.text
    assert shown.text.count("root mean squared, in the label’s own unit") == 2, "of the column and of the curve"
    assert answer(in_numbers(runs)[:1])[0].count("root mean squared, in the label’s own unit") == 1


def test_what_no_look_sees_of_a_method_is_said(others: Path, compared: Path) -> None:
    runs = read([others / "dice", compared / "1-flat"])
    text = Read(page(runs, figures(runs))).text
    assert "No look sees the feedback of dice, so its bias is shown without." in text


def test_runs_that_saw_other_gradients_are_not_ranked_as_if_they_had_the_same(others: Path, compared: Path) -> None:
    dice, flat = in_numbers(read([others / "dice", compared / "1-flat"]))
    for other, begins in ((0.6, "Over its own run *dice* is"), (0.3, "Over their own runs there is no difference")):
        said = answer([replace(dice, bias=0.3), replace(flat, bias=other)])  # noise alone would decide which
        assert said[0].startswith(begins) and "this does not rank the methods" in said[1]


@pytest.mark.parametrize("change", [None, "data.npz?train=90"])
def test_runs_of_other_data_or_tasks_are_not_ranked_at_all(
    change: str | None, others: Path, compared: Path, tmp_path: Path
) -> None:
    """A classification beside a regression, and two classifications of which one had other rows."""
    other = others / "regression"
    if change is not None:
        other = tmp_path / "other"
        shutil.copytree(compared / "1-flat", other)
        settings = other / "settings.toml"
        settings.write_text(settings.read_text().replace("data.npz", change))
    runs = read([compared / "1-flat", compared / "2-psac", other])
    shown = Read(text := page(runs, figures(runs)))
    assert "These runs are of different data or tasks, so nothing here ranks them" in shown.text
    for word in ("least biased", "most accurate", "least error", "points best", "bends the gradient least?"):
        assert word not in shown.text
    assert "num best" not in text and "is the best of its column" not in text and 'id="same-gradients"' not in text
    assert "3 private runs" in shown.text and shown.text.count(" accuracy at ε = ") == (2 if change is None else 3)


def test_an_audits_verdict_is_shown_and_a_false_claim_comes_first(compared: Path, tmp_path: Path) -> None:
    audit = {"method": "m", "audit": "white box", "claimed": 3.0, "shown": 1.5, "ceiling": 2.9, "detail": ""}
    for name in ("1-flat", "2-psac"):
        shutil.copytree(compared / name, tmp_path / name)
        passed = name == "1-flat"
        row = {**audit, "passed": passed, "shown": 1.5 if passed else 4.25}
        found = {"passed": passed, "rows": [row, {**row, "audit": "ledger"}], "note": "A <finished> run cannot be …"}
        (tmp_path / name / "audit.json").write_text(json.dumps(found))
    runs = read([tmp_path])
    found = in_numbers(runs)
    text = Read(page(runs, figures(runs))).text
    assert "every claim holds" in text and "a claim is FALSE" in text and "4.25" in text
    assert text.count("holds*:") == 1 and text.count("holds*") == 2  # as the command says of a ceiling below the claim
    assert text.count("A <finished> run cannot be …") == 2  # that the configuration was audited, and not that run
    assert "flat(clip_norm=0.5) · audited" in text and "psac(clip_norm=0.5, r=0.1) · audit: FALSE claim" in text
    assert refuted(found) == "An audit shows that the ε claimed of *psac* is FALSE: do not rely on it."
    assert text.index("is FALSE: do not rely") < text.index("least biased")
    assert refuted([row for row in found if row.name == "flat"]) == ""


def test_a_ledger_that_was_only_added_up_is_not_called_audited_and_membership_inference_is_shown(
    compared: Path, tmp_path: Path
) -> None:
    shutil.copytree(compared / "1-flat", tmp_path / "run")
    row = {"method": "m", "audit": "ledger", "claimed": 3.0, "shown": 3.0, "ceiling": 3.0, "passed": True}
    guess = {"area": 0.5091, "low": 0.498, "high": 0.5201, "tpr_at_1%": 0.012}
    found = {"passed": True, "rows": [row], "membership": {"logistic": guess}}
    (tmp_path / "run/audit.json").write_text(json.dumps(found))
    runs = read([tmp_path / "run"])
    text = Read(page(runs, figures(runs))).text
    assert "flat(clip_norm=0.5) · ledger recounted" in text and "· audited" not in text
    assert "the ledger agrees with the statement; nothing was attacked" in text and "every claim holds" not in text
    said = "Membership inference, logistic: area 0.509, 95% in [0.498, 0.520], 0.5 is guessing; 1.2% of the members at"
    assert f"{said} 1% false alarms." in text


def test_a_run_that_is_pointed_at_stands_out_however_many_there_are() -> None:
    assert '[data-on="41"] .chart .s[data-run="41"]{opacity:1}' in document("many", '<g class="s" data-run="41"></g>')


def test_beside_the_accuracy_the_page_says_what_needs_no_model(compared: Path, others: Path) -> None:
    runs = read([compared])
    same = runs[0].last["baseline"]
    for some in (runs, runs[:1]):
        assert f"Always saying the most frequent class is right for {same:.1%}." in Read(page(some, figures(some))).text
    (run,) = read([others / "regression"])
    said = f"Always saying the mean of the evaluation labels has an error of {run.last['baseline']:.4g}."
    assert said in Read(page([run], figures([run]))).text


def test_names_from_outside_are_text_and_never_markup(compared: Path, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>&*\"'"
    for name in ("a", evil):
        shutil.copytree(compared / "1-flat", tmp_path / name)
    settings = tmp_path / evil / "settings.toml"
    settings.write_text(re.sub(r"(?m)^data = .*$", f"data = {json.dumps('npz:' + evil)}", settings.read_text()))
    (tmp_path / evil / "statement.txt").write_text("</pre><script>alert(2)</script>")
    row = {"audit": evil, "passed": True, "claimed": None, "shown": None, "ceiling": None}
    (tmp_path / evil / "audit.json").write_text(json.dumps({"passed": True, "rows": [row]}))
    runs = read([tmp_path / "a", tmp_path / evil])
    assert any(evil in run.name for run in runs)
    found = Read(text := page(runs, figures(runs)))
    assert not [each for each in found.attributes if each[0] == "img" or each[1].startswith("on")]
    assert text.count("<script>") == 1 and "&lt;img src=x" in text


def test_runs_of_one_method_are_named_by_what_tells_them_apart(compared: Path, tmp_path: Path) -> None:
    def copy(name: str, method: str, rate: float = 0.5) -> Path:
        place = tmp_path / name
        shutil.copytree(compared / "1-flat", place)
        stated = json.loads((place / "statement.json").read_text())
        (place / "statement.json").write_text(json.dumps({**stated, "method": method}))
        (place / "settings.toml").write_text(f"learning_rate = {rate}\n")
        return place

    one, two = copy("one", "flat(clip_norm=1.0)"), copy("two", "flat(clip_norm=0.1)", 5.0)
    three, four = copy("three", "layerwise(psac(0.5))"), copy("four", "layerwise(psac(0.7))")
    again, faster = copy("again", "flat(clip_norm=1.0)"), copy("faster", "flat(clip_norm=1.0)", 0.7)
    assert [run.name for run in read([one, two])] == ["flat clip_norm=1.0", "flat clip_norm=0.1"]
    assert [run.name for run in read([three, four])] == ["layerwise clip_norm=0.5", "layerwise clip_norm=0.7"]
    assert [run.name for run in read([one, faster])] == ["flat learning_rate=0.5", "flat learning_rate=0.7"]
    assert [run.name for run in read([one, again])] == ["flat one", "flat again"]
    for place, text in ((one, "ages"), (again, "wages")):  # nor would a long name go into a chart
        (place / "settings.toml").write_text(f'data = "csv:{text}.csv?label=sick:no|yes&columns={"x" * 60}"\n')
    assert [run.name for run in read([one, again])] == ["flat one", "flat again"]


# drawing


def test_the_numbers_of_an_axis_are_written_in_one_way() -> None:
    for low, high, expected in (
        (0.5, 2e4, ["1", "10", "100", "1000", "10000"]),
        (1e-3, 1.0, ["0.001", "0.01", "0.1", "1"]),
        (1e-6, 1e2, ["1e-06", "1e-04", "1e-02", "1e+00", "1e+02"]),
    ):
        axis = Axis("", low, high, log=True)
        assert [formatted(tick, axis) for tick in ticks(axis, 5)] == expected
    steps = Axis("step", 0.0, 20_000.0)
    assert [formatted(tick, steps) for tick in ticks(steps, 4)] == ["0", "5000", "10000", "15000", "20000"]
    cosines = Axis("", -0.396, 0.5)
    assert min(ticks(cosines, 5)) == pytest.approx(-0.2), "−0.4 would lie below the axis line"


@given(st.floats(-1e3, 1e3), st.floats(1e-4, 1e3), st.booleans(), st.booleans())
def test_ticks_are_on_the_axis_and_read_as_what_they_are(low: float, span: float, log: bool, percent: bool) -> None:
    low = abs(low) + 1e-3 if log else low
    axis = Axis("", low, low + span, log=log, percent=percent)
    found = ticks(axis, 5)
    assert found == sorted(found) and len(found) <= 8
    assert all(-1e-6 <= share(tick, axis) <= 1.0201 for tick in found), "none below the axis line"
    if not percent and not log and abs(low) + span < 100:
        assert not any("e" in formatted(tick, axis) for tick in found if abs(tick) > 1e-9)
    if percent and not log and abs(low) < 10:
        for tick in found:
            assert float(formatted(tick, axis).rstrip("%")) / 100 == pytest.approx(tick, abs=span * 1e-3)


def test_an_axis_that_ends_just_short_of_a_round_number_shows_it() -> None:
    assert ticks(Axis("", 0.97, 2.9997), 5)[-1] == 3.0


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_labels_keep_their_order_and_distance(places: list[float]) -> None:
    found = _apart(places, 20.0, 280.0)
    order = sorted(range(len(places)), key=lambda i: places[i])
    gaps = [found[b] - found[a] for a, b in itertools.pairwise(order)]
    assert all(20 - 1e-6 <= y <= 280 + 1e-6 for y in found) and all(gap >= 15 - 1e-6 for gap in gaps)


def _brightness(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_brightness(one), _brightness(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [_LIGHT, _DARK], ids=["light", "dark"])
def test_text_has_a_contrast_of_four_and_a_half_and_lines_of_three(theme: str) -> None:
    known = dict(re.findall(r"--([\w-]+):(#\w{6});", theme))
    assert len([name for name in known if re.fullmatch(r"s\d", name)]) == len(HUES) == 8
    for ink in ("ink", "soft", "faint", "link"):
        assert all(_contrast(known[ink], known[paper]) >= 4.5 for paper in ("card", "paper")), ink
    assert all(_contrast(known[f"{each}-ink"], known[each]) >= 4.5 for each in ("warn", "false"))
    assert all(_contrast(known[f"s{number}"], known["card"]) >= 3 for number in range(8))


def test_plots_leave_a_program_s_own_backend_as_it_is(tmp_path: Path) -> None:
    line = Line("psac", 0, (1.0, 2.0), (0.5, 0.7))
    before = matplotlib.get_backend()
    matplotlib.use("pdf")
    try:
        plotted([Figure("quality", "", "", (Panel("", Axis("step"), Axis("accuracy"), (line,)),))], tmp_path)
        assert matplotlib.get_backend() == "pdf"
    finally:
        matplotlib.use(before)


def test_a_short_axis_of_powers_is_written_in_plain_numbers_that_do_not_meet(tmp_path: Path) -> None:
    line = Line("psac", 0, (2.4, 3.1), (1.1, 0.9))
    plotted(
        [Figure("kept", "", "", (Panel("", Axis("length", log=True), Axis("weight", log=True), (line,)),))], tmp_path
    )
    written = (tmp_path / "kept.svg").read_text()
    assert re.findall(r"<text[^>]*>([\d.]+)<", written) == ["2.4", "2.6", "2.8", "3", "0.9", "1", "1.1"]


def test_plots_are_written_as_pixels_and_vectors_with_the_same_names(compared: Path, tmp_path: Path) -> None:
    two = [compared / "1-flat", compared / "2-psac"]
    assert main(["report", *map(str, two), "--folder", str(tmp_path)]) == 0
    keys = {figure.key for figure in figures(read(two))}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"{k}.{e}" for k in keys for e in ("png", "svg")}
    for key in keys:
        assert (tmp_path / "plots" / f"{key}.png").read_bytes().startswith(b"\x89PNG")
    vector = (tmp_path / "plots" / "quality.svg").read_text()
    assert all(f">{run.name}<" in vector for run in read(two)) and all(hue in vector for hue in HUES[:2])


# the command


def test_the_command_writes_beside_one_comparison_and_says_where(
    compared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clipwise.report.page.plotted", lambda figures, folder: [folder / "quality.png"])
    assert main(["report", str(compared), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(compared / "report.html") and told["runs"] == 6
    assert told["plots"] == [str(compared / "plots" / "quality.png")]
    assert told["answer"] == json.loads((compared / "report.json").read_text())["answer"]


def test_the_comparison_ends_by_naming_the_page(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--data", data(base), "--model", "mlp(hidden=8)", "--methods", "flat", "--steps", "2"]
    assert main([*words, *FAST[:-1], "--folder", str(base / "named")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    named = re.fullmatch(r"Open (.+) in a browser: which method is less biased, and why\.", last)
    assert named and Path(named[1]).read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected the folder of at least one run, got none"),
        (["nowhere"], "there is no finished run in nowhere: expected a folder with statement.json, or one with runs"),
        (["broken"], "statement.json is not as clipwise writes it ('epsilon'): restore it, or train the run again"),
    ],
)
def test_what_is_no_run_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "statement.json").write_text("{}")
    assert main(["report", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and said in output.err and output.err.count("\n") == 1


def test_runs_are_read_on_a_machine_whose_own_encoding_is_not_utf_8(compared: Path) -> None:
    """Their files are in UTF-8, with ε and × in them, wherever they are read."""
    code = "import sys; from clipwise.report import read; assert chr(949) in read(sys.argv[1:])[0].stated"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(compared / "1-flat")],
        env={**os.environ, **plain, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# TensorBoard


def test_tensorboard_gets_the_recorded_numbers(base: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ["train", "--data", data(base), "--model", "mlp(hidden=8)", "--steps", "4", "--evaluate-every", "2"]
    words += ["--diagnose-every", "2", "--tensorboard", "--folder", str(tmp_path / "run")]
    assert main([*words, *FAST]) == 0
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    for name in ("epsilon", "accuracy", "loss"):
        seen = [(each.step, each.value) for each in found.Scalars(f"measured/{name}")]
        recorded = [(row["step"], row[name]) for row in lines(tmp_path / "run" / "metrics.jsonl")]
        assert [step for step, _ in seen] == [step for step, _ in recorded]
        assert [value for _, value in seen] == pytest.approx([value for _, value in recorded], rel=1e-6)
    own = [next(iter(row["methods"].values())) for row in lines(tmp_path / "run" / "diagnostics.jsonl")]
    seen = [each.value for each in found.Scalars("not private/direction_error")]
    assert seen == pytest.approx([each["direction_error"] for each in own], rel=1e-6)


def test_a_run_that_is_stopped_closes_the_file_of_its_curves(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    x, y = torch.randn(20, 3), torch.arange(20) % 2
    before = threading.active_count()  # TensorBoard writes in a thread of its own
    with pytest.raises(KeyboardInterrupt):
        train(
            nn.Linear(3, 2), cross_entropy, (x, y), noise_multiplier=1.0, steps=3, batch=10, delta=1e-3,
            folder=tmp_path / "run", tensorboard=True, evaluate=lambda _: {"one": 1}, evaluate_every=1, progress=stop,
        )  # fmt: skip
    assert threading.active_count() == before


def test_without_tensorboard_nothing_is_begun(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    words = ["train", "--data", data(base), "--steps", "1", "--tensorboard", "--folder", str(tmp_path / "run")]
    assert main([*words, *FAST]) == 2
    said = capsys.readouterr().err
    assert "pip install tensorboard" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


# live progress


TWICE = """
import sys
from clipwise.cli import main
for words in (["--quiet", "--folder", "quiet"], ["--folder", "loud"]):
    assert main([*sys.argv[1:], *words]) == 0
    print("now aloud" if "quiet" in words else "done", flush=True)
    print("now aloud", file=sys.stderr, flush=True)
"""


def on_a_terminal(words: list[str], folder: Path, columns: int = 100) -> tuple[list[str], str]:
    """The frames that a terminal shows of a quiet run and of one that is not, and standard output, which is none."""
    main_end, other = pty.openpty()
    program = [sys.executable, "-c", TWICE, *words]
    known = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(program, stderr=other, stdout=subprocess.PIPE, env=known, text=True, cwd=folder) as running:
        os.close(other)
        seen = b"".join(iter(lambda: _some(main_end), b""))
        assert running.stdout is not None
        out = running.stdout.read()
    os.close(main_end)
    assert running.returncode == 0, seen.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    return [frame for frame in re.split(r"[\r\n]+", plain) if frame.strip()], out


def _some(end: int) -> bytes:
    try:
        return os.read(end, 65536)
    except OSError:  # Linux's way of saying that the other end is closed
        return b""


def test_a_terminal_shows_epsilon_clipped_share_loss_and_the_time_left_unless_quiet(base: Path, tmp_path: Path) -> None:
    words = ["train", "--data", data(base), "--model", "mlp(hidden=8)", *FAST[:-1], "--steps", "40"]
    frames, out = on_a_terminal([*words, "--evaluate-every", "5"], tmp_path)
    assert frames[0] == "now aloud" and out.startswith("now aloud\n"), "the quiet run says nothing"
    known = re.compile(r"flat +\S+ +\d+/40 ε \d+\.\d+, clipped \d+%, loss [\d.]+, accuracy [\d.]+% (--:--|\d\d:\d\d)")
    assert any(known.fullmatch(frame.strip()) for frame in frames), frames
    assert all(len(frame) <= 100 for frame in frames)
    assert out.splitlines()[1].startswith("method ") and out.splitlines()[-2] == "written to  loud"


def test_json_lines_are_the_measurements_and_the_result_last(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", data(base), "--model", "mlp(hidden=8)", *FAST, "--steps", "6", "--evaluate-every", "2"]
    assert main([*words, "--json-lines", "--folder", str(tmp_path / "run")]) == 0
    *told, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    looks = {row["step"]: next(iter(row["methods"].values())) for row in lines(tmp_path / "run" / "diagnostics.jsonl")}
    assert len(told) == 3 and set(looks) == {0, 6}
    for row, seen in zip(lines(tmp_path / "run" / "metrics.jsonl"), told, strict=True):
        assert row.items() <= seen.items() and seen["run"] == "flat" and seen["steps"] == 6
        assert seen["clipped"] == looks[6 if row["step"] == 6 else 0]["clipped"], "of the last look"
        assert seen["seconds_left"] >= 0
    assert told[-1]["seconds_left"] == 0 and last["folder"] == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (99, "ε 1.500, clipped 25%, loss 0.5, accuracy 80.0%"),
        (30, "ε 1.500, clipped 25%, loss 0.5"),
        (5, ""),
        (9, "ε 1.500"),
    ],
)
def test_where_a_terminal_is_narrow_the_least_important_goes_first(room: int, said: str) -> None:
    assert _measured({"epsilon": 1.5, "clipped": 0.25, "loss": 0.5, "accuracy": 0.8}, room) == said


def test_no_text_rounds_an_epsilon_down() -> None:
    assert _measured({"epsilon": 2.00401, "loss": 0.5, "accuracy": 0.8}, 9) == "ε 2.005"


def test_before_the_first_measurement_only_the_clipped_share_is_known() -> None:
    assert _measured({"clipped": 1.0}, 50) == "clipped 100%" and _measured({}, 50) == ""
