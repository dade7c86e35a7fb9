"""The papers' experiments: every file is sound, runs without noise are what they say, and claims are really checked."""

from __future__ import annotations

import ast
import fnmatch
import json
import math
import signal
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clipwise import calibrate, methods, models, postprocess
from clipwise.cli import main
from clipwise.cli.reproduce import _placed
from clipwise.config import TrainConfig, checked
from clipwise.data import Arrays
from clipwise.engine import ChunkEngine
from clipwise.experiments import descend, holds, known, measures, read
from clipwise.experiments.experiment import HOME, PAPERS, SCALES, _quantities
from clipwise.experiments.results import averaged, formatted, summary
from clipwise.losses import squared_error as squared
from clipwise.methods import METHODS
from clipwise.records import Capture
from clipwise.types import InputError

NAMES = sorted(known())
REQUIRED = {
    *(f"paper0/figure{n}" for n in range(1, 8)),
    *("paper0/table1", "paper0/table2", "paper1/example_b1", "paper1/table3"),
    *(f"paper2/figure{n}" for n in range(7, 12)),
    *("paper2/table2", "paper3/table1", "paper3/figure2", "paper3/figure6"),
    *(f"paper4/figure{n}" for n in range(1, 5)),
    "paper4/table2",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, *words: str) -> dict[str, Any]:
    """The results of an experiment, from the file that the command writes."""
    folder = f"out-{len(list(Path().iterdir()))}"
    assert main(["reproduce", name, "--folder", folder, "--threads", "1", "--quiet", *words]) == 0
    found: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    return found


def values(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {run["name"]: run["values"] for run in found["runs"]}


def one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    return output.err


# ------------------------------------------------------------------------------------------------ the files themselves


def test_every_experiment_that_was_promised_is_there() -> None:
    assert set(NAMES) >= REQUIRED


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_run_has_settings_that_clipwise_train_would_take(name: str, scale: str) -> None:
    for run in read(name, scale).runs:
        given = checked(TrainConfig, run.settings, name)
        methods.parse(given["method"])
        if "post" in given:
            postprocess.parse(given["post"])
        if "model" in given:
            models.takes_tokens(given["model"])  # an unknown network is an error
        if run.noise_free:
            assert not {"epsilon", "noise_multiplier"} & set(given) and "learning_rate" in given


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_numbers_belong_to_runs_and_quantities_of_the_experiment(name: str) -> None:
    full = read(name, "full")
    runs = {run.name for run in full.runs}
    for quantity, of in full.expected.items():
        assert quantity in full.shown
        assert set(of) <= runs, f"{name}: {set(of) - runs}"


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_speaks_of_runs_that_some_scale_makes(name: str) -> None:
    runs = {run.name for scale in SCALES for run in read(name, scale).runs}
    claims = read(name, "full").claims
    if "table" not in name:
        assert claims
    for claim in claims:
        named = [
            (node.value.id, str(node.slice.value))
            for node in ast.walk(ast.parse(claim.check))
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
            if isinstance(node.slice, ast.Constant)
        ]
        assert named
        for _, run in named:
            assert any(fnmatch.fnmatchcase(one, run.replace("[", "[[]")) for one in runs), f"{name}: {run}"
        # with a number for everything that it names, the claim is decided: nothing in it is misspelt
        quantities = {quantity for quantity, _ in named}
        assert holds(claim.check, {run: dict.fromkeys(quantities, 0.5) for run in runs}) is not None


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_says_how_its_small_scale_differs(name: str) -> None:
    small, full = read(name, "small"), read(name, "full")
    assert small.reduced is (small.runs != full.runs) and not full.reduced
    assert small.note or not small.reduced


def test_the_full_setting_of_table_1_needs_the_noise_that_the_paper_needs() -> None:
    settings = {run.name: run.settings for run in read("paper0/table1", "full").runs}["CIFAR10, ε = 8"]
    rate = settings["batch"] / 50_000
    sigma = calibrate(
        epsilon=settings["epsilon"],
        delta=settings["delta"],
        sampling_rate=rate,
        steps=round(settings["epochs"] / rate),
        accountant="rdp",
    )
    assert sigma == pytest.approx(1.170, rel=0.06)  # by PLD; RDP, which is faster to compute, needs a little more
    assert sigma > 1.170


def test_table_1_of_paper_3_has_all_its_numbers() -> None:
    experiment = read("paper3/table1", "full")
    assert {run.name for run in experiment.runs} == set(experiment.expected["accuracy"])
    assert len(experiment.runs) == 3 * (2 * 3 + 1)  # methods; CIFAR-10 and CIFAR-100 at three ε, ImageNet32 at one


def test_the_files_are_shipped_with_the_package() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    patterns = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["clipwise"]
    for file in HOME.rglob("*.toml"):
        inside = file.relative_to(HOME.parent).as_posix()
        assert any(fnmatch.fnmatchcase(inside, pattern) for pattern in patterns), inside


# ---------------------------------------------------------------------------------------------------- the two examples


def test_normalised_descent_does_not_move_on_the_two_samples_of_paper_0() -> None:
    found = values(made("paper0/example31"))
    assert abs(found["normalised"]["weight"]) < 1e-9
    assert found["unclipped"]["weight"] == pytest.approx(-1, abs=1e-4)
    assert found["averaged first"]["weight"] == pytest.approx(-1, abs=1e-4)


def test_clipped_descent_keeps_a_constant_bias_and_error_feedback_has_none() -> None:
    made_ = made("paper1/example_b1")
    found = values(made_)
    assert found["clipped SGD"]["weight"] == pytest.approx(-0.5, abs=1e-4)
    assert found["DiceSGD"]["weight"] == pytest.approx(0, abs=1e-4)
    assert [claim["holds"] for claim in made_["claims"]] == [True, True]


def test_psacs_largest_weight_is_where_the_formula_says() -> None:
    found = values(made("paper4/figure2"))["DP-PSAC"]
    r = 0.1
    assert found["largest_weight"] == pytest.approx(1 / (2 * math.sqrt(r) - r), rel=1e-3)
    assert found["norm_of_largest"] == pytest.approx(math.sqrt(r) - r, rel=0.03)


# ------------------------------------------------------------------------------------------- descent without noise


def line(count: int = 6, width: int = 3) -> tuple[nn.Module, Arrays, np.ndarray, np.ndarray]:
    draw = np.random.RandomState(0)
    x, y = draw.randn(count, width), 3 * draw.randn(count)
    model = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model, Arrays((torch.from_numpy(x), torch.from_numpy(y))), x, y


def clip(v: np.ndarray, c: float) -> np.ndarray:
    return v * min(1.0, c / max(np.linalg.norm(v), 1e-300))


def grads(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 2 * (x @ w - y)[:, None] * x


def run_line(method: str, steps: int, **options: Any) -> np.ndarray:
    model, data, x, _ = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    descend(model, squared, data, methods.parse(method), optimizer, steps=steps, batch=len(x), **options)
    return next(model.parameters()).detach().numpy()[0]


def test_descent_without_noise_is_clipped_gradient_descent() -> None:
    _, _, x, y = line()
    w = np.zeros(3)
    for _ in range(20):
        w = w - 0.05 * np.mean([clip(g, 1.0) for g in grads(w, x, y)], 0)
    assert run_line("flat(1.0)", 20) == pytest.approx(w, rel=1e-4)


def test_descent_with_error_feedback_is_algorithm_2_of_paper_1() -> None:
    _, _, x, y = line()
    w, e, c1, c2 = np.zeros(3), np.zeros(3), 0.5, 0.3
    for _ in range(15):
        own = grads(w, x, y)
        v = np.mean([clip(g, c1) for g in own], 0) + clip(e, c2)
        e = e + own.mean(0) - v
        w = w - 0.05 * v
    assert run_line(f"dice(flat({c1}), feedback_norm={c2})", 15) == pytest.approx(w, rel=1e-4)


def test_descent_with_inner_and_outer_momentum_is_algorithm_2_of_paper_0() -> None:
    _, _, x, y = line()
    w, past, m = np.zeros(3), [], np.zeros(3)
    for _ in range(12):
        points = [w, *past][:3]
        inner = sum(0.3**k * grads(p, x, y) for k, p in enumerate(points)) / sum(0.3**k for k in range(len(points)))
        m = 0.4 * m + np.mean([clip(g, 1.0) for g in inner], 0)
        w, past = w - 0.05 * m, points
    found = run_line(
        "inner_momentum(flat(1.0), horizon=2, decay=0.3)", 12, post=postprocess.parse("outer_momentum(0.6)")
    )
    assert found == pytest.approx(w, rel=1e-4)


def test_averaging_all_samples_before_clipping_clips_the_mean() -> None:
    _, _, x, y = line()
    w = np.zeros(3)
    for _ in range(10):
        w = w - 0.05 * clip(grads(w, x, y).mean(0), 0.5)
    assert run_line("p_average(flat(0.5), size=6)", 10) == pytest.approx(w, rel=1e-4)


def test_the_seed_decides_the_batches() -> None:
    def once(seed: int) -> list[float]:
        model, data, _, _ = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        descend(model, squared, data, methods.flat(1.0), optimizer, steps=5, batch=2, seed=seed)
        return next(model.parameters()).flatten().tolist()

    assert once(1) == once(1) != once(2)


def test_the_last_iterates_are_given_oldest_first() -> None:
    model, data, x, _ = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = descend(model, squared, data, methods.flat(1.0), optimizer, steps=5, batch=len(x), keep=2)
    assert [iterate["weight"].numpy()[0] for iterate in kept] == [
        pytest.approx(run_line("flat(1.0)", steps)) for steps in (3, 4)
    ]


@pytest.mark.parametrize(
    "method",
    [
        "adaptive(1.0)",
        "schedule([(0, flat(1.0))])",
        "momentum_per_sample(flat(1.0))",
        "dice(memory='blocks')",
        "dice(memory='bounded')",
        "batch_clipping(flat(1.0))",
    ],
)
def test_what_changes_from_step_to_step_or_needs_public_inputs_is_not_run_without_noise(method: str) -> None:
    with pytest.raises(InputError, match="same at every step and needs no public inputs"):
        run_line(method, 1)


# ------------------------------------------------------------------------------------------------------- measurements


def test_gradient_columns_equal_their_definitions_for_averages_of_two_samples() -> None:
    model, data, x, y = line()
    rows = data.rows(torch.arange(6))
    method = methods.parse("p_average(flat(2.0), size=2)")
    found = measures.gradients(ChunkEngine(Capture(model, squared), torch.arange(6)), rows, method, {})
    pairs = grads(np.zeros(3), x, y).reshape(3, 2, 3).mean(1)
    mean = pairs.mean(0)
    clipped = np.mean([clip(g, 2.0) for g in pairs], 0)
    assert found["sampling_noise"] == pytest.approx(((pairs - mean) ** 2).sum(1).mean())
    assert found["norm_75"] == pytest.approx(np.quantile(np.linalg.norm(pairs, axis=1), 0.75))
    assert found["bias"] == pytest.approx(np.linalg.norm(clipped - mean), rel=1e-4)
    assert found["cosine"] == pytest.approx(clipped @ mean / np.linalg.norm(clipped) / np.linalg.norm(mean), rel=1e-4)


def test_every_weight_function_can_be_drawn() -> None:
    for name in ("flat", "normalised", "automatic", "psac", "global_"):
        found, curve = measures.weights(METHODS[name]())
        assert found["largest_weight"] == max(row["weight"] for row in curve)


def test_a_runs_summary_has_its_last_row_and_its_means() -> None:
    found = summary([{"step": 1.0, "a": 1.0}, {"step": 2.0, "a": 3.0}], {"ece": 0.5})
    assert found == {"step": 2.0, "a": 3.0, "mean_a": 2.0, "ece": 0.5}


def test_seeds_are_averaged_and_their_deviation_is_kept() -> None:
    found = averaged("x", True, [({"a": 1.0}, {}, 1.0), ({"a": 3.0}, {}, 2.0)])
    assert found.values == {"a": 2.0} and found.spread["a"] == pytest.approx(math.sqrt(2)) and found.seconds == 3


def test_shares_are_written_in_percent_and_other_numbers_are_not() -> None:
    assert formatted("epsilon", 1.27012) == "1.271" and formatted("weight", 9999.9) == "10000"
    assert formatted("train_accuracy", 0.5) == "50.00 %" and formatted("mean_off_direction_x", 0.5) == "50.00 %"
    assert (
        formatted("loss", 0.5) == "0.5"
        and formatted("loss", 0.5, signed=True) == "+0.5"
        and formatted("loss", None) == "—"
    )


# --------------------------------------------------------------------------------------------------------------- claims

MEASURED = {"a": {"q": 1.0}, "ab": {"q": 3.0}, "c d": {"q": 2.0, "r": -1.0}}


@pytest.mark.parametrize(
    ("check", "truth"),
    [
        ("q['a'] < q['ab']", True),
        ("q['a'] > q['ab']", False),
        ("1 <= q['a'] < 2", True),
        ("q['c d'] * 2 - 1 >= q['ab'] and r['c d'] < 0", True),
        ("q['a'] < 2 and r['c d'] > 0", False),
        ("max(q['a*']) <= 3 and min(q['a*'], 0) >= 0", True),
        ("max(q['*b']) >= 3", True),
        ("spread(q['a*']) > 1.5", True),
        ("abs(r['c d']) >= 1", True),
        ("r['c d'] / (q['a'] - 1) > -5", False),
        ("q['missing'] > 0", None),
        ("r['a'] > 0", None),
        ("max(r['a*']) > 0", None),
        ("q['a'] > 2 and r['a'] > 0", None),
    ],
)
def test_a_claim_holds_or_does_not_or_cannot_be_told(check: str, truth: bool | None) -> None:
    assert holds(check, MEASURED) is truth


@pytest.mark.parametrize(
    "check", ["__import__('os')", "q['a']", "q.a > 1", "open('x') > 1", "q['a'] == 1", "q['a' > 1", "[1] > 0", "q > 1"]
)
def test_nothing_but_a_claim_is_evaluated(check: str) -> None:
    with pytest.raises(InputError, match="expected a claim"):
        holds(check, MEASURED)


# ---------------------------------------------------------------------------------------------------------- the command

OWN = """
title = "A test"
shows = "Nothing."
shown = ["accuracy", "epsilon", "ece", "auc", "train_accuracy", "sampling_noise"]
measures = ["train", "gradients", "calibration", "membership", "window"]
samples = 40
window = 2
compare = { other = "psac(0.5)" }
settings = { data = "digits", model = "mlp(hidden=8)", batch = 100, steps = 4, delta = 5e-4, learning_rate = 0.5 }

[small]
over = { c = [1.0] }
note = "One threshold."

[[runs]]
name = "private {c}"
over = { c = [1.0, 2.0] }
settings = { method = "flat({c})", noise_multiplier = 1.0, noise_seed = 1, accountant = "rdp", self_test = false }

[[runs]]
name = "free"
settings = { method = "flat(1.0)" }
noise_free = true

[expected]
accuracy = { free = 0.5 }

[[claims]]
says = "Noise costs something."
check = "accuracy['free'] > 2 * accuracy['private 1.0']"

[plot]
kind = "lines"
y = ["accuracy"]
"""


def own(text: str = OWN) -> str:
    Path("own.toml").write_text(text)
    return "own.toml"


def test_an_experiment_of_ones_own_is_measured_and_held_against_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", own(), "--folder", "out", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Small scale" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["run", "data", "quantity", "measured", "paper"] in lines  # at another scale a run's name may mislead
    assert ["free", "digits", "accuracy"] in [line[:3] for line in lines]
    assert "\nOne threshold.\nNot private: trained without noise, for analysis only: free.\n" in shown
    found = json.loads(Path("out/results.json").read_text())
    runs = {run["name"]: run for run in found["runs"]}
    assert set(runs) == {"private 1.0", "free"}
    private, free = runs["private 1.0"], runs["free"]
    statement = json.loads(Path("out/1-0/statement.json").read_text())
    assert private["private"] and private["values"]["epsilon"] == pytest.approx(statement["epsilon"])
    # without noise there is no run to publish: no ε, no ledger, no model
    assert not free["private"] and "not private" in free["note"] and "epsilon" not in free["values"]
    assert [path.name for path in Path("out").iterdir() if path.is_dir()] == ["1-0"]
    for name in ("accuracy", "ece", "auc", "train_accuracy", "sampling_noise", "bias_other", "mean_cosine"):
        assert name in private["values"] and name in free["values"]
    assert "noise_of_window" in free["values"]
    # what a file can speak of is what is measured
    assert {*private["values"], *free["values"]} == _quantities(tomllib.loads(OWN)) - {"error", "mean_error"}
    lines = {(each["run"], each["quantity"]): each for each in found["lines"]}
    assert lines["free", "accuracy"]["difference"] == pytest.approx(free["values"]["accuracy"] - 0.5)
    (claim,) = found["claims"]
    assert claim["holds"] is (free["values"]["accuracy"] > 2 * private["values"]["accuracy"])
    assert found["plots"]


def test_an_experiment_that_states_no_numbers_has_no_column_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", own(OWN.replace("accuracy = { free = 0.5 }", "")), "--only", "private*"]) == 0
    shown = capsys.readouterr().out
    assert ["run", "data", "quantity", "measured"] in [line.split() for line in shown.splitlines()]
    assert "states no number" not in shown


def test_the_full_scale_makes_all_runs_and_only_chooses_among_them() -> None:
    assert [run.name for run in read(own(), "full").runs] == ["private 1.0", "private 2.0", "free"]
    found = made(own(), "--scale", "full", "--only", "free", "--seeds", "2")
    assert [run["name"] for run in found["runs"]] == ["free"] and found["claims"][0]["holds"] is None
    assert found["runs"][0]["spread"]["accuracy"] > 0


def test_a_method_that_is_refused_does_not_take_the_other_runs_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clipwise.cli import reproduce
    from clipwise.types import Refused

    def refuse(*_: object, **__: object) -> None:
        raise Refused("there is no proof")

    monkeypatch.setattr(reproduce, "run_one", refuse)
    assert main(["reproduce", own(), "--folder", "out", "--threads", "1"]) == 0
    assert "private 1.0 was refused: there is no proof" in capsys.readouterr().out
    found = json.loads(Path("out/results.json").read_text())
    assert [run["refused"] for run in found["runs"]] == ["there is no proof", ""]
    assert found["runs"][1]["values"]


def test_settings_of_the_command_line_take_the_place_of_the_experiments_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "private*", "--set", "steps=2", "model=mlp(hidden=9)", "noise_multiplier=3"]
    assert main(["reproduce", own(), "--folder", "out", "--threads", "1", *words]) == 0
    assert "Set by --set: steps=2, model=mlp(hidden=9), noise_multiplier=3." in " ".join(
        capsys.readouterr().out.split()
    )
    found = json.loads(Path("out/results.json").read_text())
    assert found["set"] == {"steps": 2, "model": "mlp(hidden=9)", "noise_multiplier": 3.0}
    run = tomllib.loads(Path("out/1-0/settings.toml").read_text())
    assert (run["steps"], run["model"], run["noise_multiplier"]) == (2, "mlp(hidden=9)", 3.0)


def test_what_was_measured_before_a_run_breaks_off_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from clipwise.cli import reproduce

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reproduce._Study, "_noise_free", broken)
    with pytest.raises(MemoryError):
        main(["reproduce", own(), "--folder", "out", "--threads", "1", "--quiet"])
    found = json.loads(Path("out/results.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["private 1.0"] and found["runs"][0]["values"]


def test_an_interrupted_experiment_goes_on_and_ends_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from clipwise.cli import reproduce

    words = ["--scale", "full", "--set", "evaluate_every=1", "--threads", "1", "--quiet"]
    assert main(["reproduce", own(), "--folder", "whole", *words]) == 0
    looks, real = [0], reproduce._Study._look

    def stopped(*given: Any) -> Any:
        looks[0] += 1
        if looks[0] == 4 + 3:  # the second run's third
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(reproduce._Study, "_look", stopped)
    assert main(["reproduce", own(), "--folder", "parts", *words]) == 130
    assert "finished runs are kept: write clipwise reproduce --resume parts\n" in capsys.readouterr().err
    first = Path("parts/1-0.json").stat().st_mtime_ns
    assert not Path("parts/2-0.json").exists() and Path("parts/2-0/checkpoint.pt").exists()
    holds = "parts holds an experiment: write clipwise reproduce --resume parts"
    for command in ("train", "compare"):
        assert holds in one_line(capsys, [command, "--resume", "parts"])
    assert "write clipwise reproduce --resume parts, which was" in one_line(capsys, ["report", "parts/2-0"])
    assert "keeps its settings, got --scale small" in one_line(
        capsys, ["reproduce", "--resume", "parts", "--scale", "small"]
    )
    assert "whole/1-0 holds one run" in one_line(capsys, ["reproduce", "--resume", "whole/1-0"])
    assert main(["reproduce", "--resume", "parts", "--threads", "1", "--quiet"]) == 0
    assert looks[0] == 4 + 3 + 1 + 4  # the one that was left of the second run, and those of the third
    assert Path("parts/1-0.json").stat().st_mtime_ns == first
    whole, parts = (json.loads(Path(folder, "results.json").read_text()) for folder in ("whole", "parts"))
    for found in (whole, parts):
        for run in found["runs"]:
            del run["seconds"]
    assert parts["runs"] == whole["runs"] and parts["lines"] == whole["lines"] and parts["claims"] == whole["claims"]
    # finished: read again, whatever the runs' folders hold; other settings by now are noticed
    assert main(["reproduce", "--resume", "parts", "--threads", "1", "--quiet"]) == 0
    own(OWN.replace("steps = 4", "steps = 5"))
    assert "'private 1.0' in parts was made with other settings" in one_line(
        capsys, ["reproduce", "--resume", "parts", "--threads", "1", "--quiet"]
    )


def test_a_run_that_left_no_checkpoint_is_made_again_beside_what_it_released() -> None:
    assert main(["reproduce", own(), "--folder", "out", "--threads", "1", "--quiet"]) == 0
    before = json.loads(Path("out/results.json").read_text())["runs"][0]["values"]
    Path("out/1-0.json").unlink()  # as if it had ended after the run's last step
    assert main(["reproduce", "--resume", "out", "--threads", "1", "--quiet"]) == 0
    assert json.loads(Path("out/results.json").read_text())["runs"][0]["values"] == before
    assert Path("out/1-0/statement.json").exists() and Path("out/1-0-again/statement.json").exists()


def test_an_experiment_that_cannot_begin_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the folder would be taken, and what is resumed in it would keep the wrong place of the data."""
    words = ["reproduce", "paper4/table2", "--data-dir", "nowhere", "--folder", "out"]
    assert "nowhere/mnist does not exist" in one_line(capsys, words)
    assert not Path("out").exists()


def test_data_that_a_later_run_misses_is_said_before_the_first_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez("some.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    Path("two.toml").write_text(
        """
title = "Two data sets"
shows = "Of which one is not there."
shown = ["accuracy"]
settings = { epsilon = 3.0, steps = 2, batch = 10, method = "flat()" }
small = { note = "small" }
[[runs]]
name = "one"
settings = { data = "npz:some.npz" }
[[runs]]
name = "two"
settings = { data = "npz:other.npz" }
"""
    )
    monkeypatch.setattr("clipwise.cli.reproduce.run_one", lambda *_, **__: pytest.fail("a run was begun"))
    assert "no file 'other.npz'" in one_line(capsys, ["reproduce", "two.toml", "--folder", "out"])
    assert not Path("out").exists()


def test_a_network_of_the_users_takes_the_place_of_the_experiments_own() -> None:
    text = own(OWN.replace('"membership", "window"', '"membership"').replace("samples = 40", "samples = 0"))  # a batch
    small, large = (
        values(made(text, "--only", "free", *words))["free"] for words in ([], ["--model", "mlp(hidden=9)"])
    )
    assert small["accuracy"] != large["accuracy"]


def test_the_experiment_in_the_documentation_can_be_made() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reproduce.md").read_text()
    Path("mine.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    found = made("mine.toml", "--set", "steps=2", "accountant=rdp", "self_test=false")
    assert [run["name"] for run in found["runs"]] == ["flat, C = 0.1", "flat, C = 1.0", "psac"]
    assert found["claims"][0]["holds"] is not None and "cosine" in found["runs"][0]["values"]


def test_the_documentation_has_a_row_for_every_experiment() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reproduce.md").read_text()
    assert [name for name in NAMES if f"| {name} |" not in page] == []


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(NAMES)
    assert main(["reproduce", "--list"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "Test accuracy of DP-SGD, Auto-S and DP-PSAC [mnist, fashion_mnist]" in listed
    assert "Weight of a gradient by its norm [no data]" in listed
    assert "paper4/table2" in listed and "Xia et al. 2023: Differentially Private Learning with Per-Sample" in listed
    assert {name.partition("/")[0] for name in NAMES} == set(PAPERS)


def test_json_is_what_the_folder_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "paper4/figure2", "--folder", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("out/results.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got none: write clipwise reproduce --list"),
        (["paper4/tabel2"], "did you mean 'paper4/table2'"),
        (["paper4/table2", "--scale", "smal"], "did you mean 'small'"),
        (["paper4/table2", "--data-dir", "nowhere"], "nowhere"),
        (["paper4/figure2", "--only", "nobody"], "is called nobody: write one of 'Auto-S', 'DP-PSAC', "),
        (["none.toml"], "cannot read none.toml"),
        (["paper4/table2", "--set", "epochs"], "expected a setting such as epochs=2, got 'epochs'"),
        (["paper4/table2", "--set", "epoch=2"], "did you mean 'epochs'"),
        (["paper0/figure2", "--set", "epsilon=2.0"], "can have no epsilon"),
        (
            ["paper1/example_b1", "--set", "optimizer=adam", "momentum=0.9"],
            "the optimizer adam has no momentum, got 0.9",
        ),
        (["paper1/example_b1", "--set", "optimizer=adm"], "did you mean 'adam'"),
        (["paper1/example_b1", "--set", "steps=0"], "steps must be a whole number of at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in one_line(capsys, ["reproduce", *words])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("title =", "titel =", "did you mean 'title'"),
        ('name = "free"', 'naem = "free"', "did you mean 'name'"),
        ("batch = 100", "bacth = 100", "did you mean 'batch'"),
        ("batch = 100", 'batch = "100"', "must be a whole number"),
        ('"train", ', '"trian", ', "did you mean 'train'"),
        ('kind = "lines"', 'kind = "line"', "did you mean 'lines'"),
        ('name = "free"', 'name = "private 1.0"', "names of their own"),
        ('{ method = "flat(1.0)" }', '{ method = "flat(1.0)", epsilon = 1.0 }', "can have no epsilon"),
        ("\"accuracy['free'] >", "\"acuracy['free'] >", "quantity in a claim of own.toml, 'acuracy': did you"),
        ("accuracy['private 1.0']\"", "accuracy['privat 1.0']\"", "as a claim says: did you mean 'private 1.0'"),
        ("2 * accuracy", "2 ** accuracy", "expected a claim such as"),
        ("2 * accuracy['private 1.0']", "2 * accuracy['p*']", "expected a claim such as"),  # two numbers
        ("accuracy['free'] >", "mean_nll['free'] >", "'mean_nll': did you mean"),  # the final model's alone
        ("{ free = 0.5 }", "{ fre = 0.5 }", "run in expected.accuracy of own.toml, 'fre': did you mean 'free'"),
        ("accuracy = { free", "acuracy = { free", "quantity in expected of own.toml, 'acuracy': did you"),
        ('shown = ["accuracy"', 'shown = ["acuracy"', "quantity in shown of own.toml, 'acuracy': did you"),
        ('y = ["accuracy"]', 'y = ["acuracy"]', "quantity in plot of own.toml, 'acuracy': did you"),
        ('"train", ', "", "train_accuracy in shown of own.toml is not measured: write measures = ['train', …]"),
        ('says = "Noise costs something."', "", "a claim of own.toml must say its says"),
        ('name = "free"', "", "a run of own.toml must say its name"),
    ],
)
def test_a_wrong_file_says_where_and_what(
    capsys: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    assert before in OWN
    words = ["reproduce", own(OWN.replace(before, after)), "--only", "free", "private 1.0", "--folder", "out"]
    assert message in one_line(capsys, words)


def test_data_sets_are_looked_for_in_folders_of_their_names() -> None:
    assert _placed("cifar10?train=20&test=10", "sets") == "cifar10:sets/cifar10?train=20&test=10"
    assert _placed("digits", "sets") == "digits"
    assert _placed("jsonl:DIR/a.jsonl?test_file=DIR/b.jsonl", "sets") == "jsonl:sets/a.jsonl?test_file=sets/b.jsonl"


def test_networks_of_tokens_and_of_numbers_share_an_experiment_s_texts() -> None:
    """Each gets them as it takes them; a run that names no network has the one for texts."""
    lines = [json.dumps({"text": f"word {n} {'good' if n % 2 else 'bad'}", "label": n % 2}) for n in range(40)]
    Path("texts.jsonl").write_text("\n".join(lines))
    Path("texts.toml").write_text(
        "title = 'Texts'\nshows = 'Two networks.'\nshown = ['accuracy']\nnoise_free = true\n"
        "[settings]\ndata = 'jsonl:DIR/texts.jsonl?label=label:0|1&text=text&tokens=4'\nsteps = 1\nbatch = 8\n"
        "learning_rate = 0.1\n"
        "[small]\nnote = 'Small.'\n[full]\n[[runs]]\nname = 'tokens'\n"
        "[[runs]]\nname = 'numbers'\nsettings = { model = 'mlp' }\n"
    )
    assert set(values(made("texts.toml", "--data-dir", "."))) == {"tokens", "numbers"}
