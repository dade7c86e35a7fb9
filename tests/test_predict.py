"""``clipwise predict``: new rows are prepared as those that the run was trained on, and need no label."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipwise.cli import main
from clipwise.data import load
from clipwise.models import build
from test_cli import FAST

TABLE = "csv:people.csv?label=income:low|high&columns=age:0..100|,town:#4,sex:f|m"
WAYS = {
    "a table": (TABLE, "mlp"),
    "a regression": ("csv:people.csv?label=pay:100..500&columns=age:0..100|,sex:f|m", "mlp"),
    "columns that nobody named": ("csv:numbers.csv?label=y:0|1", "mlp"),
    "texts": ("jsonl:notes.jsonl?label=y:0|1&text=note&tokens=4&vocabulary=50", "gru_enhanced"),
    "texts as numbers": ("jsonl:notes.jsonl?label=y:0|1&text=note&tokens=4&vocabulary=50", "mlp"),
    "pictures": ("npz:pictures.npz?scale=centred", "mlp"),
    "features of pictures": ("npz:larger.npz?features=scattering", "scattering_linear"),
    "numbers of arrays": ("npz:numbers.npz?task=regression", "mlp"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of each kind."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.RandomState(0)
    lines = [
        f"{'' if n % 7 == 0 else draw.randint(100)},{'abcd'[draw.randint(4)]},{'fm'[n % 2]},"
        f"{('low', 'high')[draw.randint(2)]},{draw.randint(100, 500)}"
        for n in range(60)
    ]
    Path("people.csv").write_text("age,town,sex,income,pay\n" + "\n".join(lines) + "\n")
    Path("numbers.csv").write_text("a,b,y\n" + "".join(f"{n},{-n},{n % 2}\n" for n in range(60)))
    Path("notes.jsonl").write_text(
        "".join(json.dumps({"note": f"word{n % 9} day", "y": n % 2}) + "\n" for n in range(60))
    )
    y = draw.randint(0, 3, 60)
    np.savez("pictures.npz", x=draw.randint(0, 256, (60, 1, 4, 4)).astype(np.uint8), y=y)
    np.savez("larger.npz", x=draw.randint(0, 256, (60, 1, 8, 8)).astype(np.uint8), y=y)
    np.savez("numbers.npz", x=draw.randn(60, 3), y=draw.randn(60))
    return tmp_path


def trained(data: str, *words: str) -> None:
    assert main(["train", "--data", data, *FAST, "--steps", "4", "--quiet", "--folder", "run", *words]) == 0


def predictions(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    capsys.readouterr()
    assert main(["predict", "run", "--data", *words]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.filterwarnings("ignore:nothing is said about the range")
@pytest.mark.parametrize("way", WAYS)
def test_predictions_are_those_of_the_model_for_rows_prepared_as_in_training(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, network = WAYS[way]
    trained(text, "--model", network)
    data = load(text)
    model = build(network, data.shape, data.classes, data.vocabulary, data.task)
    model.load_state_dict(torch.load("run/model.pt", weights_only=True))
    model.eval()
    x, _ = data.test.rows(torch.arange(len(data.test)))
    with torch.no_grad():
        wanted = model(x if network == "gru_enhanced" else x.float())
    rows = predictions(capsys, text.partition("?")[0].partition(":")[2])  # of the whole file: one in five is the test
    assert len(rows) == 60
    if data.task == "regression":
        middle = 300 if "pay" in text else 0
        found = torch.tensor([float(row["prediction"]) for row in rows])
        near(found, middle + data.unit * wanted[:, 0])
        return
    names = [key.removeprefix("p_") for key in rows[0] if key.startswith("p_")]
    found = torch.tensor([[float(row[f"p_{name}"]) for name in names] for row in rows])
    near(found, wanted.softmax(1))
    assert [row["prediction"] for row in rows] == [names[place] for place in found.argmax(1).tolist()]


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every row that the test part has is found, in its order."""
    rows = iter(found)
    for each in wanted:
        assert any(torch.allclose(row, each, rtol=1e-4, atol=1e-5) for row in rows)


def test_new_rows_need_no_label_and_their_columns_may_stand_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    trained(TABLE)
    Path("people.csv").rename("gone.csv")  # whoever predicts need not have the private rows
    Path("new.csv").write_text("sex,note,age,town\nf,x,30,a\nm,y,,b\nother,z,99,unheard of\n")
    Path("same.csv").write_text("age,town,sex,income\n30,a,f,low\n,b,m,high\n99,unheard of,other,low\n")
    rows = predictions(capsys, "new.csv", "--keep", "note", "sex")
    assert [list(row.values())[:2] for row in rows] == [["x", "f"], ["y", "m"], ["z", "other"]]
    assert list(rows[0]) == ["note", "sex", "prediction", "p_low", "p_high"]
    of_same = predictions(capsys, "csv:same.csv")
    assert [row["p_low"] for row in rows] == [row["p_low"] for row in of_same]
    capsys.readouterr()
    assert main(["predict", "run", "--data", "new.csv", "--json"]) == 0
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["p_high"] for row in told] == [float(row["p_high"]) for row in rows]


@pytest.mark.filterwarnings("ignore:nothing is said about the range")
def test_of_two_classes_a_threshold_predicts_the_second_from_that_probability_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(TABLE)
    shares = sorted({float(row["p_high"]) for row in predictions(capsys, "people.csv")})
    bar = (shares[0] + shares[-1]) / 2
    rows = predictions(capsys, "people.csv", "--threshold", str(bar))
    assert [row["prediction"] for row in rows] == ["high" if float(row["p_high"]) >= bar else "low" for row in rows]
    assert {row["prediction"] for row in rows} == {"low", "high"}
    assert "threshold must be a number above 0" in refused(capsys, "run", "--data", "people.csv", "--threshold", "-1")


@pytest.mark.parametrize("way", ["a regression", "pictures"])
def test_a_threshold_is_for_two_classes(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, model = WAYS[way]
    trained(data, "--model", model)
    file = data.partition("?")[0].partition(":")[2]
    assert "--threshold is for two classes, got" in refused(capsys, "run", "--data", file, "--threshold", "0.1")


def test_columns_that_nobody_named_are_those_of_the_run_s_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    trained("csv:numbers.csv?label=y:0|1")
    Path("turned.csv").write_text("more,b,a\nx,-5,5\n")
    Path("straight.csv").write_text("a,b\n5,-5\n")
    assert predictions(capsys, "turned.csv") == predictions(capsys, "straight.csv")
    Path("numbers.csv").unlink()
    assert "numbers.csv, which is not there" in refused(capsys, "run", "--data", "straight.csv")


def test_what_cannot_be_predicted_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    trained(TABLE)
    Path("new.csv").write_text("age,sex,prediction\n30,f,x\n")
    assert "got no 'town' among age, sex, prediction: add it" in refused(capsys, "run", "--data", "new.csv")
    Path("new.csv").write_text("age,sex,town,prediction\n30,f,a,x\n")
    assert "no column 'prediction' to keep" in refused(capsys, "run", "--data", "new.csv", "--keep", "prediction")
    assert "write --keep town sex" in refused(capsys, "run", "--data", "new.csv", "--keep", "town,sex")
    assert "did you mean 'town'" in refused(capsys, "run", "--data", "new.csv", "--keep", "towns")
    assert "leave them out" in refused(capsys, "run", "--data", "csv:new.csv?separator=;")
    assert "no --data" in refused(capsys, "run") and "0 folders" in refused(capsys, "--data", "new.csv")
    Path("run/settings.toml").rename("settings.toml")
    assert "a run made in Python" in refused(capsys, "run", "--data", "new.csv")
    Path("settings.toml").rename("run/settings.toml")
    Path("run/model.pt").unlink()
    assert "cannot read run/model.pt" in refused(capsys, "run", "--data", "new.csv")


def test_a_file_with_another_separator_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    trained(TABLE)
    Path("new.csv").write_text("age;town;sex\n30;a;f\n")
    said = refused(capsys, "run", "--data", "new.csv")
    assert "as those of people.csv, which the run was trained on, got separator=semicolon: save it" in said


def test_arrays_of_another_shape_or_kind_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    trained("npz:pictures.npz")
    np.savez("new.npz", x=np.zeros((2, 1, 4, 5), np.uint8))
    assert "shape [1, 4, 4]" in refused(capsys, "run", "--data", "new.npz")
    np.savez("new.npz", x=np.zeros((2, 1, 4, 4)))  # already scaled, perhaps: nobody knows
    assert "torch.uint8" in refused(capsys, "run", "--data", "new.npz")
    np.savez("new.npz", z=np.zeros(2))
    assert "must hold x" in refused(capsys, "run", "--data", "new.npz")


def test_a_model_with_public_companions_gives_the_same_file_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.RandomState(0)
    np.savez("colours.npz", x=draw.randint(0, 256, (40, 3, 8, 8)).astype(np.uint8), y=np.arange(40) % 2)
    words = ("--model", "resnet20_bn", "--method", "batch_clipping(companions=2)", "--public", "3", "--no-self-test")
    trained("npz:colours.npz", *words)
    first = predictions(capsys, "colours.npz")
    assert len(first) == 40 and first == predictions(capsys, "colours.npz")


def test_a_cell_that_does_not_fit_is_not_answered_by_options_that_only_training_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(TABLE)
    Path("new.csv").write_text("age,town,sex\n7,a,f\nunknown,b,m\n")
    said = refused(capsys, "run", "--data", "new.csv")
    assert "got 'unknown' in line 3: mend the cell" in said and "LOW..HIGH" not in said


def test_new_rows_may_have_a_line_of_names_or_no_label_also_where_the_run_s_file_had_no_names(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "bare.csv").write_text(
        "".join(f"{20 + n % 60},{'fm'[n % 2]},{('low', 'high')[n % 2]}\n" for n in range(60))
    )
    trained("csv:bare.csv?names=age,sex,income&label=income:low|high&columns=age:0..100,sex:f|m")
    (here / "whole.csv").write_text("30,f,low\n70,m,low\n")
    expected = predictions(capsys, "whole.csv")
    assert len(expected) == 2
    for text in ("30,f\n70,m\n", "age,sex\n30,f\n70,m\n", "sex,income,age\nf,low,30\nm,low,70\n"):
        (here / "new.csv").write_text(text)
        assert predictions(capsys, "new.csv") == expected, text
    (here / "new.csv").write_text("30\n70\n")
    assert main(["predict", "run", "--data", "new.csv"]) == 2
    shown = capsys.readouterr().err
    assert "must have the 3 columns age, sex, income in each row, got 1 in line 1: mend it\n" in shown  # no options


def test_a_file_without_the_names_that_the_run_s_has_is_told_so_without_its_values(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    trained(TABLE)
    (here / "new.csv").write_text("41,secret,f\n42,b,m\n")
    capsys.readouterr()
    assert main(["predict", "run", "--data", "new.csv"]) == 2
    shown = capsys.readouterr().err
    assert "must begin with a line of names" in shown and "age, town, sex" in shown and "secret" not in shown
