"""The command: what each subcommand does, and one line for everything that is wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipwise import __version__, accounting, training
from clipwise.accounting import Ledger
from clipwise.accounting.dice import DicePlan
from clipwise.cli import COMMANDS, main
from clipwise.cli.parts import network, resolved, steps_of, use_threads
from clipwise.cli.runs import without_privacy
from clipwise.cli.screen import Bar
from clipwise.cli.stopping import patient, resume_command, resumed
from clipwise.config import CompareConfig, TrainConfig, made, to_toml
from clipwise.data import load
from clipwise.methods import METHODS, parse
from clipwise.private import Private
from clipwise.report import read
from clipwise.report.answer import RunNumbers, in_numbers, privacy_costs, told
from clipwise.start import make_private
from clipwise.types import InputError

RUN = [sys.executable, "-c", "from clipwise.cli import main; raise SystemExit(main())"]
# privacy that costs no time to calibrate or to add up
FAST = ["--noise-multiplier", "1", "--accountant", "rdp", "--batch", "20", "--delta", "1e-3", "--threads", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test, with a small learnable data set in it."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.RandomState(0)
    y = draw.randint(0, 3, 100)
    saved(x=3 * np.eye(4)[y] + draw.randn(100, 4), y=y)
    return tmp_path


def saved(name: str = "data.npz", **arrays: Any) -> str:
    np.savez(name, **arrays)
    return f"npz:{name}"


def small(*words: str, steps: int = 4) -> list[str]:
    return ["train", "--data", "npz:data.npz", *FAST, "--steps", str(steps), *words]


def one_line(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 2) -> str:
    """The line that the command fails with."""
    capsys.readouterr()  # what ran before may have warned
    assert main(words) == code
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    return lines[0]


def unlearnt(text: str) -> str:
    """The text without the warning that a short run learnt nothing: its noise decides that."""
    return "".join(line for line in text.splitlines(keepends=True) if "is no better than always saying" not in line)


# help and version


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
@pytest.mark.parametrize("told", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}])
def test_a_run_s_steps_do_not_ask_the_system_for_the_same_memory_again(told: dict[str, str]) -> None:
    script = """
import resource
import torch
from clipwise.cli.runs import keep_memory
keep_memory()
asked = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    asked.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(asked))  # a system may take a page away at any time
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | told
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    # 64 MB are 16 384 pages, or 32 where they are huge
    assert int(done.stdout) > 24 if told else int(done.stdout) < 16


def test_without_arguments_it_shows_the_commands_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(command.example in shown and command.does in shown for command in COMMANDS.values())


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"clipwise {__version__}\n"


@pytest.mark.parametrize(
    ("data", "threads"),
    [("digits", 1), ("csv:a.csv?label=y:0|1", 1), ("csv:a.csv?label=y:0|1&text=note", 3), ("mnist:there", 3)],
)
def test_data_that_are_small_get_one_thread_since_more_only_wait(data: str, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        use_threads(TrainConfig(data=data))
        assert torch.get_num_threads() == threads
        use_threads(TrainConfig(data=data, threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert "--config FILE" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line(capsys, ["tran"]) == "error: unknown command 'tran': did you mean 'train'?"


# calibrate and cite


def test_calibrate_gives_the_noise_multiplier_without_torch() -> None:
    words = "['calibrate','--epsilon','4','--samples','50','--batch','2','--epochs','60','--json']"
    code = f"import sys; from clipwise.cli import main; main({words}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answer, torch_was_imported = done.stdout.splitlines()
    assert json.loads(answer)["noise_multiplier"] == pytest.approx(1.848, abs=0.005)
    assert torch_was_imported == "False"


def test_calibrate_gives_epsilon_for_a_noise_multiplier(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", "--noise-multiplier", "1.848", "--sampling-rate", "0.04", "--steps", "1500"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(4.0, abs=0.01)
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("ε = 3.99")


def test_calibrate_wants_one_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", "--sampling-rate", "0.04", "--steps", "15"]
    assert "got neither" in one_line(capsys, words)
    assert "got both" in one_line(capsys, [*words, "--epsilon", "1", "--noise-multiplier", "1"])


@pytest.mark.parametrize("long", ["--steps", "--epochs"])
@pytest.mark.parametrize(
    ("rate", "said"), [("1.5", "must be above 0 and at most 1, got 1.5"), ("0", "must be a number above 0, got 0.0")]
)
def test_a_sampling_rate_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], rate: str, said: str, long: str
) -> None:
    words = ["calibrate", "--epsilon", "1", "--sampling-rate", rate, long, "15"]
    assert f"sampling_rate {said}" in one_line(capsys, words)


MNIST = ["--samples", "60000", "--batch", "600"]


def calibrated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["calibrate", *words, "--accountant", "rdp", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_calibrate_takes_samples_batch_and_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    found = calibrated(capsys, "--epsilon", "3", *MNIST, "--epochs", "2.5")
    assert (found["sampling_rate"], found["steps"]) == (0.01, 250)
    assert (found["samples"], found["batch"], found["epochs"]) == (60000, 600, 2.5)
    expected = accounting.calibrate(epsilon=3, delta=1e-5, sampling_rate=0.01, steps=250, accountant="rdp")
    assert found["noise_multiplier"] == expected
    back = calibrated(capsys, "--noise-multiplier", str(expected), *MNIST, "--steps", "250")
    assert back["epsilon"] == accounting.epsilon(
        noise_multiplier=expected, delta=1e-5, sampling_rate=0.01, steps=250, accountant="rdp"
    )
    assert calibrated(capsys, "--epsilon", "3", "--sampling-rate", "0.01", "--epochs", "2.5")["steps"] == 250


# the last three lie half-way between two whole numbers, but for rounding
@pytest.mark.parametrize(
    ("samples", "batch", "epochs"), [(80, 20, 2.0), (80, 80, 0.1), (191, 1, 2.5), (191, 4, 10.0), (198, 1, 7.25)]
)
def test_calibrate_train_and_make_private_make_the_same_number_of_steps_of_epochs(
    capsys: pytest.CaptureFixture[str], samples: int, batch: int, epochs: float
) -> None:
    model = torch.nn.Linear(2, 2)
    data = (torch.zeros(samples, 2), torch.zeros(samples, dtype=torch.long))
    private = make_private(
        model, torch.optim.SGD(model.parameters()), data, noise_multiplier=1.0, epochs=epochs, batch=batch, delta=1e-3
    )
    words = ["--samples", str(samples), "--batch", str(batch), "--epochs", str(epochs), "--noise-multiplier", "1"]
    assert calibrated(capsys, *words)["steps"] == private.steps
    assert steps_of(TrainConfig(batch=batch, epochs=epochs), samples) == private.steps


@pytest.mark.parametrize("memory", ["full", "none", "blocks", "bounded"])
def test_calibrate_keeps_the_bounds_that_are_proved_of_feedback(
    capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    text = f"dice(flat(0.5), feedback_norm=0.002, memory='{memory}', blocks=5)"
    plan = DicePlan.of(parse(text), 600.0, 60000)
    assert plan is not None
    setting: dict[str, Any] = {"delta": 1e-5, "steps": 40, "accountant": "rdp"}
    words = [*MNIST, "--steps", "40", "--method", text]
    found = calibrated(capsys, "--epsilon", "5", *words)
    least, less = (plan.epsilon(noise_multiplier=part * found["noise_multiplier"], **setting) for part in (1, 0.998))
    assert least <= 5 < less
    assert (found["method"], found["sensitivity"]) == (str(parse(text)), plan.sensitivity)
    other = accounting.calibrate(epsilon=5, sampling_rate=0.01, **setting)
    assert (found["noise_multiplier"] == other) == (memory == "none")  # whose sensitivity alone is larger
    back = calibrated(capsys, "--noise-multiplier", "6", *words)
    assert back["epsilon"] == plan.epsilon(noise_multiplier=6.0, **setting)
    assert main(["calibrate", "--noise-multiplier", "6", "--accountant", "rdp", *words]) == 0
    shown = capsys.readouterr().out
    assert f"over the sensitivity {plan.sensitivity:g} of {parse(text)}, by the bound proved of it" in shown
    assert ("each step from one of 5 groups" in shown) == (memory in ("blocks", "bounded"))


@pytest.mark.parametrize(
    ("method", "sensitivity"),
    [("flat(0.5)", 0.5), ("psac", 1.0), ("p_average(flat(0.5), size=4)", 1.0), ("adaptive", None), ("layerwise", None)],
)
def test_calibrate_says_that_other_methods_take_the_same_multiplier_over_their_sensitivity(
    capsys: pytest.CaptureFixture[str], method: str, sensitivity: float | None
) -> None:
    words = ["--epsilon", "3", *MNIST, "--epochs", "1"]
    without = calibrated(capsys, *words)
    assert calibrated(capsys, *words, "--method", method) == without | {
        "method": str(parse(method)),
        "sensitivity": sensitivity,
    }
    assert main(["calibrate", "--accountant", "rdp", *words, "--method", method]) == 0
    known = "" if sensitivity is None else f" {sensitivity:g}"
    said = f"over the sensitivity{known} of {parse(method)}; it is the same for all methods without feedback"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "5"], "expected either --sampling-rate, or --samples and --batch, got none: write"),
        (["--steps", "5", "--samples", "9"], "or --samples and --batch, got --samples: write for instance --samples"),
        (["--steps", "5", "--batch", "9", "--sampling-rate", "0.1"], "and --batch, got --sampling-rate, --batch: w"),
        ([*MNIST], "expected either --epochs or --steps, got neither"),
        ([*MNIST, "--epochs", "1", "--steps", "5"], "expected either --epochs or --steps, got both"),
        ([*MNIST, "--epochs", "0"], "epochs must be a number above 0, got 0.0"),
        (
            ["--samples", "5", "--batch", "6", "--steps", "5"],
            "batch must be at most the 5 samples, got 6: write --batch 2",
        ),
        (["--samples", "0", "--batch", "0", "--steps", "5"], "samples must be a whole number of at least 1, got 0"),
        (["--sampling-rate", "0.1", "--steps", "5", "--method", "dice"], "expected --samples and --batch, got --samp"),
        ([*MNIST, "--steps", "5", "--method", "momentum_per_sample"], "is for full batches"),
        ([*MNIST, "--steps", "5", "--method", "pasc"], "unknown method 'pasc': did you mean 'psac'?"),
    ],
)
def test_calibrate_says_what_it_expects(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in one_line(capsys, ["calibrate", "--epsilon", "3", *words])


def test_cite_prints_every_method_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cite", "--json"]) == 0
    papers = json.loads(capsys.readouterr().out)
    assert sorted(name for paper in papers for name in set(paper["methods"])) == sorted(METHODS)
    assert len({paper["key"] for paper in papers}) == len(papers)


def test_cite_names_what_a_method_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cite", "layerwise(automatic)", "automatic"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("@inproceedings") == 2
    assert "mcmahan2018general" in shown
    assert "bu2023automatic" in shown


# bench


def test_bench_passes_its_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--rows", "mnist_cnn", "--columns", "clipwise", "--rounds", "1", "--batch", "2", "--no-memory"]
    assert main([*words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [cell["column"] for cell in table["rows"][0]["cells"]] == ["plain", "clipwise"]
    assert table["rows"][0]["batch"] == 2


# train


def test_train_writes_a_run_and_says_where(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert main(small("--method", "psac", "--epochs", "2", steps=4)) == 2  # both epochs and steps
    capsys.readouterr()
    assert main(small("--method", "psac")) == 0
    output = capsys.readouterr()
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("data-psac-")
    assert f"written to  runs/{folder.name}" in output.out
    assert "psac(clip_norm=1.0, r=0.1)" in output.out
    assert unlearnt(output.err) == ""
    assert {path.name for path in folder.iterdir()} == {
        "settings.toml", "ledger.jsonl", "metrics.jsonl", "diagnostics.jsonl", "calibration.json", "model.pt",
        "statement.json", "statement.txt",
    }  # fmt: skip


def test_train_learns_the_embedded_digits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--method", "psac", "--epsilon", "3", "--steps", "60", "--accountant", "rdp", "--json"]
    assert main([*words, "--noise-seed", "0", "--evaluate-every", "60"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] > 0.8
    assert result["epsilon"] <= 3
    assert result["statement"]["generator"] == "seeded(0)"


def test_a_run_is_repeated_from_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small("--folder", "first", "--noise-seed", "5", "--average", "0.5", "--optimizer", "adam")) == 0
    assert main(["train", "--config", "first/settings.toml", "--folder", "second"]) == 0
    first, second = (torch.load(f"{name}/model.pt") for name in ("first", "second"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert Path("first/settings.toml").read_text() == Path("second/settings.toml").read_text()
    assert "anyone with the seed can subtract it" in " ".join(capsys.readouterr().out.split())


def test_the_seed_fixes_the_first_weights_and_not_the_noise() -> None:
    for name in ("first", "second"):
        assert main(small("--folder", name, "--quiet", steps=1)) == 0
    first, second = (torch.load(f"{name}/model.pt") for name in ("first", "second"))
    assert not any(torch.equal(first[key], second[key]) for key in first)


def test_beside_the_accuracy_stands_what_always_saying_the_same_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.random.RandomState(0).randn(100, 4), (np.arange(100) % 10 == 0).astype(int)
    data = saved("rare.npz", x=x, y=y, x_test=x, y_test=y)
    assert main(["train", "--data", data, *FAST, "--steps", "1"]) == 0
    assert "baseline 90.0% by always saying the most frequent class" in " ".join(capsys.readouterr().out.split())
    data = saved("far.npz", x=x, y=4.0 * y, x_test=x, y_test=4.0 * y) + "?task=regression"
    assert main(["train", "--data", data, *FAST, "--steps", "1"]) == 0
    assert "baseline 1.2 by always saying the mean of their labels" in " ".join(capsys.readouterr().out.split())


def test_samples_that_are_taken_as_public_are_not_said_to_be_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    saved(x=np.random.RandomState(0).rand(100, 1, 2, 2), y=np.arange(100) % 3)
    words = ["--method", "batch_clipping(flat(1.0), companions=2)", "--public", "6"]
    assert main(small(*words, "--model", "resnet20_bn", "--no-self-test", steps=1)) == 0
    assert "of 14 evaluation samples" in " ".join((shown := capsys.readouterr().out).split())
    assert ", 1 step" in shown and "1 steps" not in shown


def test_batch_clipping_names_a_network_with_batchnorm_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(capsys, small("--method", "batch_clipping(companions=2)", "--public", "6"))
    assert "write one with it, such as --model resnet20_bn" in line
    saved(x=np.random.RandomState(0).rand(100, 1, 2, 2), y=np.arange(100) % 3)
    assert "(BatchNorm2d) normalises with the batch's own" in one_line(capsys, small("--model", "resnet20_bn"))


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small("--quiet")) == 0
    shown = capsys.readouterr()
    assert (shown.out, unlearnt(shown.err)) == ("", "")


def test_a_run_that_diverged_has_null_where_json_has_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    assert main(small("--learning-rate", "1e38", "--noise-seed", "1", "--json-lines")) == 0
    shown = capsys.readouterr()
    *measured, result = (json.loads(line, parse_constant=refuse) for line in shown.out.splitlines())
    assert len(measured) == 4 and measured[-1]["loss"] is None and result["loss"] is None
    assert "warning: flat had diverged at step 1: its loss or gradients were not finite" in shown.err
    assert "no better than" not in shown.err, "one reason is enough"
    place = Path(result["folder"])
    for name in ("metrics.jsonl", "diagnostics.jsonl"):
        rows = [json.loads(line, parse_constant=refuse) for line in (place / name).read_text().splitlines()]
        assert rows[-1]["step"] == 4, name
    assert math.isnan(read([place])[0].last["loss"]), "who reads it again has numbers"


def test_tokens_go_to_models_of_tokens_and_as_numbers_to_others(capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.RandomState(0)
    data = saved("tokens.npz", x=draw.randint(0, 9, (50, 5)), y=draw.randint(0, 2, 50))
    words = ["train", "--data", data, *FAST, "--steps", "1", "--quiet", "--model"]
    assert main([*words, "mlp"]) == 0
    assert main([*words, "lstm_classifier", "--vocabulary", "9"]) == 0
    assert "got 0 to 8: write --vocabulary 9" in one_line(capsys, [*words, "lstm_classifier", "--vocabulary", "5"])
    other = ["train", "--data", "npz:data.npz", *FAST, "--model", "lstm_classifier", "--vocabulary", "5"]
    assert "takes whole numbers (tokens)" in one_line(capsys, other)


def test_texts_of_one_s_own_get_a_network_of_tokens_with_their_vocabulary(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "t.csv").write_text("note,y\n" + "good day,1\nbad day,0\n" * 25)
    data = "csv:t.csv?label=y:0|1&text=note&tokens=4&vocabulary=50"
    words = ["train", "--data", data, *FAST, "--steps", "1", "--quiet"]
    assert main([*words, "--folder", "run"]) == 0
    assert 'model = "gru_enhanced"' in (here / "run/settings.toml").read_text()
    said = one_line(capsys, [*words, "--vocabulary", "20"])
    assert "at least that of the data, 50, got 20: leave --vocabulary out, or write vocabulary=20 among" in said
    assert main([*words, "--model", "mlp"]) == 0
    said = "mlp reads each word's number as a quantity, which it is not, and will learn little: write --model gru_enh"
    assert said in capsys.readouterr().err


def test_a_number_may_be_written_as_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", "--noise-multiplier", "1", "--steps", "5", "--accountant", "rdp", "--json"]
    assert main([*words, "--sampling-rate", "256/2400"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling_rate"] == 256 / 2400


def test_a_test_part_of_one_class_is_told_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    x, y = np.random.RandomState(0).randn(100, 4), np.arange(100) % 2
    data = saved("one.npz", x=x, y=y, x_test=x, y_test=0 * y)
    assert main(["train", "--data", data, *FAST, "--steps", "2", "--folder", "one", "--quiet"]) == 0
    said = "All evaluation samples of flat are of one class, so that accuracy says nothing: look at the labels."
    assert capsys.readouterr().err == f"warning: {said}\n"


def test_a_rare_class_that_accuracy_does_not_show_is_seen_in_the_area_under_the_curve(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    x = np.random.RandomState(0).randn(400, 4)
    data = saved("rare.npz", x=x, y=(x[:, 0] > 1.3).astype("int64"))
    words = ["--data", data, *FAST, "--epochs", "4"]
    assert main(["compare", *words, "--methods", "flat; psac; no privacy", "--folder", "both"]) == 0
    table = capsys.readouterr().out
    measured = here.glob("both/*/metrics.jsonl")
    runs = [json.loads(path.read_text().splitlines()[-1])["roc_auc"] for path in measured]
    runs.append(json.loads((here / "both/no-privacy.jsonl").read_text())["roc_auc"])
    assert "AUC" in table and all(f" {area:.3f} " in table for area in runs)
    assert main(["train", *words, "--folder", "one"]) == 0
    area = json.loads((here / "one/metrics.jsonl").read_text().splitlines()[-1])["roc_auc"]
    assert f"ROC AUC     {area:.3f} between the two classes" in capsys.readouterr().out
    assert "ROC AUC" in (here / "both/report.html").read_text()


def test_a_run_that_learnt_nothing_is_told_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    draw = np.random.RandomState(0)
    x, y = draw.randn(100, 4), np.arange(100) % 4 == 0
    words = [*FAST, "--steps", "2", "--learning-rate", "1e-9"]  # it stays as it began
    data = saved("rare.npz", x=x, y=y.astype("int64"), x_test=x, y_test=(~y).astype("int64"))
    assert main(["train", "--data", data, *words, "--folder", "classes", "--quiet"]) == 0
    said = capsys.readouterr().err
    measured = [json.loads(line) for line in (here / "classes/metrics.jsonl").read_text().splitlines()]
    assert measured[-1]["baseline"] == 0.75 >= measured[-1]["accuracy"]
    assert said == (
        "warning: flat is no better than always saying the most frequent class, which is right for 75.0% of the "
        f"evaluation samples (ROC AUC {measured[-1]['roc_auc']:.3f}: 0.5 is guessing, and well above it the "
        "probabilities tell the classes apart): try more epochs, a larger batch, another learning rate or a larger ε; "
        "a class that is rare is predicted more often by clipwise predict --threshold 0.1.\n"
    )
    assert main(["compare", "--data", data, *words, "--methods", "flat; psac", "--folder", "both"]) == 0
    assert "warning: flat and psac are no better than always saying the most frequent" in capsys.readouterr().err
    assert "flat and psac are no better than always saying" in (here / "both/report.html").read_text()
    target = draw.randn(100) + 5
    numbers = saved("far.npz", x=x, y=target, x_test=x, y_test=target) + "?task=regression"
    assert main(["train", "--data", numbers, *words]) == 0
    shown = capsys.readouterr()
    assert f"the mean of the evaluation labels, whose error is {target.std():.4g}: try more" in shown.err
    assert "(root mean squared, in the label’s own unit) on 100 evaluation samples" in " ".join(shown.out.split())


def test_a_run_that_learnt_is_not_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*small("--quiet", "--learning-rate", "0.1", steps=60), "--noise-multiplier", "0.3"]) == 0
    assert capsys.readouterr().err == ""


# compare


def test_compare_lays_methods_side_by_side(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    words = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "2", "--methods", "flat; adaptive @ 0.1"]
    assert main([*words, "--folder", "runs/first"]) == 0
    shown = capsys.readouterr()
    assert "adaptive @ 0.1" in shown.out
    assert "own mean" in shown.out
    assert "On the same gradients" not in shown.out  # adaptive has no number there, and one method is no ranking
    assert "a choice that the ε of its run does not cover" in " ".join(shown.out.split())
    assert "Runs written to runs/first" in shown.out
    assert "learning_rate = 0.1\n" in (here / "runs/first/2-adaptive/settings.toml").read_text()
    assert main([*words, "--folder", "runs/second", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["runs"]] == ["flat", "adaptive @ 0.1"]
    assert all(0 <= row["bias"] <= 1 and 0 <= row["clipped"] <= 1 for row in result["runs"])
    assert "not empty" in one_line(capsys, [*words, "--folder", "runs/second"])


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--data", "npz:data.npz", *FAST, "--steps", "1", "--methods", "flat; global_(10.0) @ 0.02"],
        [
            "audit",
            "--method",
            "flat",
            "layerwise",
            "--trials",
            "1500",
            "--canaries",
            "20",
            "--noise-seed",
            "1",
            "--quiet",
        ],
        ["models"],
    ],
    ids=lambda words: words[0],
)
def test_a_narrow_terminal_cuts_no_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert "…" not in table and max(map(len, table.splitlines())) <= 60


def test_compare_ranks_methods_on_the_same_gradients_by_the_report_s_numbers(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    words = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "2", "--methods", "flat; global_(2.0); adaptive"]
    assert main([*words, "--folder", "runs/ranked"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = json.loads((here / "runs/ranked/report.json").read_text())["runs"]
    biases = sorted((row["same_bias"], row["name"]) for row in found if row["same_bias"] is not None)
    assert [name for _, name in biases] in (["flat", "global"], ["global", "flat"])
    ranked = ", ".join(f"{name} {bias:.1%}" for bias, name in biases)
    assert f"On the same gradients, least biased first: {ranked}. Not ranked: adaptive," in shown


def test_compare_starts_every_method_from_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts, train = [], training.train

    def spy(model: torch.nn.Module, *rest: Any, **options: Any) -> Any:
        firsts.append([parameter.detach().clone() for parameter in model.parameters()])
        return train(model, *rest, **options)

    monkeypatch.setattr(training, "train", spy)
    assert main(["compare", "--data", "npz:data.npz", *FAST, "--steps", "1", "--quiet", "--methods", "flat;psac"]) == 0
    assert len(firsts) == 2
    assert all(torch.equal(one, other) for one, other in zip(*firsts, strict=True))


def test_compare_lays_regressions_side_by_side_by_their_error(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    x = np.random.RandomState(0).randn(100, 4)
    data = saved("numbers.npz", x=x, y=3 * x[:, 0]) + "?task=regression"
    words = ["compare", "--data", data, *FAST, "--steps", "2", "--methods", "flat; psac @ 1e-5"]
    assert main([*words, "--folder", "runs/errors"]) == 0
    shown = capsys.readouterr()
    errors = [read([here / "runs/errors" / run])[0].last["error"] for run in ("1-flat", "2-psac")]
    assert "accuracy" not in shown.out.partition("This comparison")[0].lower()
    for method, error in zip(("flat", "psac @ 1e-5"), errors, strict=True):
        assert re.search(rf"^{method} +{error:.4g} ", shown.out, re.MULTILINE)
        assert f"{method}: error {error:.4g}, " in shown.err
    assert f"Least error: {'flat' if errors[0] < errors[1] else 'psac @ 1e-5'}." in shown.out
    assert main(["compare", "--resume", "runs/errors", "--json"]) == 0
    assert [row["error"] for row in json.loads(capsys.readouterr().out)["runs"]] == errors


def test_compare_measures_the_same_network_without_privacy_and_keeps_nothing_else_of_it(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    words = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "9", "--methods"]
    words += ["flat; no privacy; no privacy @ 0.2; psac", "--folder", "both"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in (here / "both/no-privacy.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["no privacy", "no privacy @ 0.2"]
    assert re.search(rf"^no privacy +{rows[0]['accuracy']:.1%} +none +– +– +–", shown, re.MULTILINE)
    assert "covered by no ε" in " ".join(shown.split())
    # no folder, model, ledger or statement: what is kept is its measurement, and no run counts as one more
    assert sorted(place.name for place in (here / "both").iterdir() if place.is_dir()) == ["1-flat", "2-psac"]
    assert [run.method.name for run in read([here / "both"])] == ["flat", "psac"]
    kept = (here / "both/no-privacy.jsonl").read_text()
    assert main(["compare", "--resume", "both", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["runs"]] == ["flat", "psac"]
    assert result["no_privacy"] == rows and (here / "both/no-privacy.jsonl").read_text() == kept


def test_what_privacy_costs_is_told_against_the_best_private_run(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    words = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "2", "--methods", "flat; psac", "--folder", "both"]
    assert main([*words, "--quiet"]) == 0

    def measured(**without: float | None) -> list[RunNumbers]:
        row = {"method": "no privacy", "loss": 0.1, "seconds": 1.0, **without}
        (here / "both/no-privacy.jsonl").write_text(json.dumps(row) + "\n")
        return in_numbers(read([here / "both"]))

    assert "Without privacy" not in " ".join(told(measured(accuracy=0.5, loss=None)))  # it diverged
    assert "reached 0.0%, no better than always saying the most" in " ".join(told(measured(accuracy=0.0)))
    (row, _) = (replace(row, accuracy=0.9, baseline=0.5) for row in measured(accuracy=0.8))
    (said,) = privacy_costs([row])
    assert said.startswith("Without privacy the same network reached 80.0%, no better than *flat*")
    top = max(row.accuracy or 0.0 for row in measured(accuracy=1.0))
    capsys.readouterr()
    assert main(["report", "both"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reached 100.0%: privacy costs" in said
    assert f"{100 - round(100 * top, 1):.1f} percentage points, at ε =" in said
    shown = (here / "both/report.html").read_text()
    assert "Without privacy the same network reached 100.0%" in shown and "covered by no ε: show it only to" in shown


def test_training_without_privacy_is_ordinary_training_from_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(data="npz:data.npz", model="mlp", epsilon=3.0, steps=3, batch=80, learning_rate=0.5, chunk=30)
    splits = load(config.data)
    made_by_hand = network(config, splits).model
    x, y = splits.train.rows(torch.arange(80))
    optimizer = torch.optim.SGD(made_by_hand.parameters(), lr=0.5, momentum=0.9)
    for rate in (0.5, 0.5 * (1 + math.cos(math.pi / 3)) / 2, 0.5 * (1 + math.cos(2 * math.pi / 3)) / 2):  # cosine
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(made_by_hand(x), y).backward()
        optimizer.step()
    seen = []
    monkeypatch.setattr("clipwise.cli.runs.measured", lambda _, model: seen.append(model) or {})
    with Bar(quiet=True) as bar:
        bar.begin("no privacy")
        without_privacy(resolved(config), splits, bar)
    for one, other in zip(seen[0].parameters(), made_by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "words",
    [["train", "--method", "no privacy"], ["compare", "--methods", "no privacy"], ["audit", "--method", "no privacy"]],
)
def test_no_privacy_is_no_method(capsys: pytest.CaptureFixture[str], here: Path, words: list[str]) -> None:
    more = [] if words[0] == "audit" else ["--data", "npz:data.npz", "--epsilon", "3"]
    assert "expected a" in one_line(capsys, [*words, *more])
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("flat; psca", "did you mean 'psac'?"),
        ("flat @ fast", "expected METHOD @ LEARNING RATE, got 'flat @ fast'"),
        (";", "expected at least one method"),
        ("flat; no_privacy", "training without privacy is written 'no privacy'"),
    ],
)
def test_compare_refuses_what_it_cannot_train(
    capsys: pytest.CaptureFixture[str], here: Path, methods: str, message: str
) -> None:
    assert message in one_line(capsys, ["compare", "--epsilon", "3", "--methods", methods])
    assert not (here / "runs").exists()


# bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epsilon", "0"], "epsilon must be a number above 0, got 0"),
        (["--epsilon", "-1"], "epsilon must be a number above 0, got -1.0"),
        (["--epsilon", "nan"], "epsilon must be a number above 0, got nan"),
        (["--epsilon", "much"], "--epsilon must be a number, got 'much': write --epsilon 0.5"),
        ([], "expected either --epsilon or --noise-multiplier, got neither: write for instance --epsilon 3"),
        (["--epsilon", "1", "--noise-multiplier", "1"], "got both"),
        (["--epsilon", "1", "--delta", "1"], "delta must be above 0 and below 1, got 1.0"),
        (
            ["--epsilon", "1", "--batch", "81"],
            "at most the 80 samples of the data, got 81: write for instance --batch 40",
        ),
        (["--epsilon", "1", "--batch", "0"], "batch must be a whole number of at least 1, got 0"),
        (["--epsilon", "1", "--steps", "0"], "steps must be a whole number of at least 1, got 0"),
        (["--epsilon", "1", "--epochs", "-1"], "epochs must be a number above 0, got -1.0"),
        (["--epsilon", "1", "--evaluate-every", "0"], "evaluate_every must be a whole number of at least 1, got 0"),
        (["--epsilon", "1", "--average", "2"], "average must be above 0 and below 1, got 2.0"),
        (["--epsilon", "1", "--method", "pasc"], "unknown method 'pasc': did you mean 'psac'?"),
        (["--epsilon", "1", "--method", "psac("], "expected a method such as psac"),
        (["--epsilon", "1", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'?"),
        (["--epsilon", "1", "--model", "digits_cnn"], "digits_cnn takes samples of shape (1, 8, 8), got (4,)"),
        (["--epsilon", "1", "--method", "flat(inf)"], "in the method 'flat(inf)': a number must be finite, got inf"),
        (["--epsilon", "1", "--method", "dp_sat(radius=-inf)"], "a number must be finite, got -inf"),
        (["--epsilon", "1", "--data", "digit"], "unknown data 'digit': did you mean 'digits'?"),
        (["--epsilon", "1", "--data", "npz:no/data.npz"], "does not exist"),
        (["--epsilon", "1", "--data", "npz:dada.npz"], "did you mean 'data.npz'?"),
        (["--epsilon", "1", "--optimizer", "adamm"], "unknown optimizer 'adamm': did you mean 'adam'?"),
        (["--epsilon", "1", "--optimizer", "adam", "--momentum", "0.5"], "the optimizer adam has no momentum"),
        (["--epsilon", "1", "--momentum", "-2"], "Invalid momentum value: -2.0"),
        (["--epsilon", "1", "--learning-rate", "0"], "learning_rate must be a number above 0"),
        (["--epsilon", "1", "--device", "mps"], "unknown device 'mps': write cpu, cuda or cuda:1"),
        (["--epsilon", "1", "--device", "gpu"], "unknown device 'gpu': write cpu, cuda or cuda:1"),
        (["--epsilon", "1", "--schedule", "cosin"], "unknown schedule 'cosin': did you mean 'cosine'?"),
        (["--epsilon", "1", "--accountant", "pdl"], "unknown accountant 'pdl': did you mean 'pld'?"),
        (["--epsilon", "1", "--threads", "0"], "threads must be a whole number of at least 1, got 0"),
        (["--epsilo", "1"], "unknown option '--epsilo': did you mean '--epsilon'?"),
        (["--seeds", "3"], "unknown option '--seeds': in a comparison name a method as often as it is to run"),
        (["--clip-norm", "1"], "unknown option '--clip-norm': write it behind the method's name, --method 'flat(1.0)'"),
        (["--threshold", "0.1"], "unknown option '--threshold': write it with clipwise predict"),
        (["--class-weights", "1"], "unknown option '--class-weights': write clipwise predict --threshold 0.1 where"),
        (["--label", "y"], "unknown option '--label': write it within --data, 'csv:PATH?label=NAME:low|high'"),
        (["--output", "x"], "unknown option '--output': did you mean '--folder'?"),
        (["--eps", "1"], "unknown option '--eps': did you mean '--epsilon'?"),
        (["--epsilon", "1/0"], "--epsilon must be a number, got '1/0': write --epsilon 0.5"),
        (["--epsilon", "1/2/3"], "--epsilon must be a number, got '1/2/3': write --epsilon 0.5"),
        (["--lr", "1"], "unknown option '--lr': did you mean '--learning-rate'?"),
        (["--batch_size=1"], "unknown option '--batch_size': did you mean '--batch'?"),
        (["--bs", "1"], "unknown option '--bs': did you mean '--batch'?"),
        (["--xyzzy", "1"], "unknown option '--xyzzy': see clipwise train --help"),
        (["--config", "none.toml"], "cannot read none.toml (No such file or directory)"),
        (["--resume", "nowhere"], "there is no run to resume in nowhere"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], here: Path, words: list[str], message: str
) -> None:
    given = [] if "--resume" in words else ["--data", "npz:data.npz", "--batch", "20"]
    assert message in one_line(capsys, ["train", *given, *words])
    assert [path.name for path in here.iterdir()] == ["data.npz"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (np.where(x == x[3, 1], np.nan, x), y), "got 1 NaN or infinite, the first in row 3"),
        (lambda x, y: (x[:0], y[:0]), "x must have rows of features, [rows, ...], got shape [0, 4]"),
        (lambda x, y: (x, np.where(np.arange(100) == 5, -1, y)), "labels of at least 0, got -1 in row 5"),
        (lambda x, y: (x, np.where(np.arange(100) == 5, 1000, y)), "labels 0 to classes − 1, got 1000"),
        (lambda x, y: (x, y[:-1]), "equally many rows, got 100 and 99"),
        (lambda x, y: (x.astype(str), y), "x must hold real numbers"),
        (lambda x, y: (x, 0 * y), "y must hold labels of at least two classes, got the label 0 alone in npz:data.npz"),
    ],
)
def test_bad_data_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], here: Path, change: Any, message: str
) -> None:
    good = np.load("data.npz")
    x, y = change(good["x"], good["y"])
    saved(x=x, y=y)
    assert message in one_line(capsys, small())
    assert [path.name for path in here.iterdir()] == ["data.npz"]


def test_a_large_delta_is_a_one_line_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small("--delta", "0.1", "--quiet")) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: delta=0.1 is not below 1/samples")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epsilon", "-1"], "epsilon must be a number above 0"),
        (["--noise-multiplier", "0"], "noise_multiplier must be a number above 0"),
        (["--epsilon", "1", "--delta", "2"], "delta must be above 0 and below 1"),
        (["--epsilon", "1", "--epochs", "0"], "epochs must be a number above 0"),
        (["--epsilon", "1", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'?"),
        (["--epsilon", "1", "--folder", "."], "the folder . is not empty"),
        (["--epsilon", "1", "--folder", "data.npz"], "data.npz is a file, expected a folder that is new"),
        (
            ["--epsilon", "1", "--folder", "data.npz/x"],
            "cannot write into the folder data.npz/x (Not a directory): choose",
        ),
        (["--epsilon", "1"], "no file 'none.npz'"),
        (["--epsilon", "1", "--folder", "a/b/c"], "no file 'none.npz'"),
    ],
)
def test_what_needs_no_data_is_said_before_they_are_read(
    capsys: pytest.CaptureFixture[str], here: Path, words: list[str], message: str
) -> None:
    for command in ("train", "compare", "advise"):
        if command != "advise" or {"--folder"} & {*words}:
            assert message in one_line(capsys, [command, "--data", "npz:none.npz", *words])
        assert [path.name for path in here.iterdir()] == ["data.npz"]


def test_a_folder_that_is_not_empty_is_left_alone(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "letter.txt").write_text("dear")
    assert "the folder mine is not empty" in one_line(capsys, small("--folder", "mine"))
    compare = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "1", "--folder", "mine"]
    assert one_line(capsys, compare) == one_line(capsys, small("--folder", "mine"))
    assert [path.name for path in (here / "mine").iterdir()] == ["letter.txt"]


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(training, "train", broken)
    with pytest.raises(ZeroDivisionError):
        main(small())


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_space(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if (here / "run" / "metrics.jsonl").exists():  # from the first measurement on
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    line = one_line(capsys, small("--folder", "run", "--evaluate-every", "2", steps=6))
    assert "No space left on device" in line
    assert line.endswith("clipwise train --resume run")
    kept = {path.name for path in (here / "run").iterdir()}
    assert kept == {"ledger.jsonl", "metrics.jsonl", "diagnostics.jsonl", "checkpoint.pt", "settings.toml"}
    monkeypatch.setattr(os, "fsync", real)
    assert main(["train", "--resume", "run", "--quiet"]) == 0
    # step 2 was made twice: the first time after the last checkpoint, and it counts
    assert Ledger(here / "run" / "ledger.jsonl").releases == 6 + 1


@pytest.mark.parametrize("command", ["--help", "calibrate --help"])
def test_output_is_in_utf_8_where_the_machine_s_own_encoding_lacks_its_signs(command: str) -> None:
    """Windows writes files in cp1252: a run ended in a traceback after its last step."""
    windows = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([*RUN, *command.split()], env=windows, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "ε" in done.stdout.decode("utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["--version", "reproduce --list"])  # text, and a table
def test_output_that_cannot_be_written_is_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*RUN, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: cannot write the output (No space left on device): free space or write it elsewhere"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_lines_that_cannot_be_written_stop_the_run_and_say_how_to_go_on(here: Path) -> None:
    with Path("/dev/full").open("w") as full:
        words = [*RUN, *small("--folder", "run", "--json-lines", steps=4)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cannot write the output")
    assert line.endswith("clipwise train --resume run")


def test_a_reader_of_lines_that_goes_away_does_not_stop_the_run(here: Path) -> None:
    words = [*RUN, *small("--folder", "run", "--json-lines", "--evaluate-every", "1", steps=4)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        said = run.stderr.read()
    assert run.returncode == 0, said
    assert "Traceback" not in said
    assert (here / "run" / "statement.json").is_file()


@pytest.mark.parametrize("command", [[], ["advise"], ["audit"]])
def test_help_is_as_wide_as_the_terminal(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


# Ctrl-C


# at its thirtieth step it waits for Ctrl-C, so that on a busy machine too it is not done before
WAITING = """
import signal, time
from clipwise.cli import main
from clipwise.cli.screen import Bar
shown, first = Bar.__call__, []
def show(bar, done, *rest):
    shown(bar, done, *rest)
    first.append(signal.getsignal(signal.SIGINT))
    for _ in range(30_000 if done == 30 else 0):
        if signal.getsignal(signal.SIGINT) is not first[0]:  # it was heard
            break
        time.sleep(0.01)
Bar.__call__ = show
raise SystemExit(main())
"""


def recorded(ledger: Path) -> int:
    return ledger.read_text().count("\n")


def test_ctrl_c_waits_for_the_step_and_the_resumed_run_makes_exactly_the_planned_releases(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    steps, ledger = 60, here / "run" / "ledger.jsonl"
    words = small("--folder", "run", "--method", "adaptive", "--evaluate-every", "25", steps=steps)
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None and not (ledger.exists() and recorded(ledger) > 20):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=600)
    assert process.returncode == 130, error
    assert output == ""
    made = Ledger(ledger).releases
    assert 0 < made < steps
    assert error.splitlines() == [
        f"stopped after step {made} of {steps}; nothing is lost: write clipwise train --resume run"
    ]
    assert torch.load(here / "run" / "checkpoint.pt")["step"] == made

    assert "a resumed run keeps its settings, got --batch 5" in one_line(
        capsys, ["train", "--resume", "run", "--batch", "5"]
    )
    # one that the self-test refuses late can be ended
    assert main(["train", "--resume", "run", "--no-self-test", "--json", "--quiet"]) == 0
    stated = json.loads(capsys.readouterr().out)["statement"]
    assert stated["releases"] == steps and not stated["self_tested"]
    assert Ledger(ledger).releases == steps
    assert "is finished: repeat it with clipwise train --config" in one_line(capsys, ["train", "--resume", "run"])


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_as_if_it_had_not_been_stopped(
    kind: signal.Signals, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    seeded = ("--noise-seed", "1", "--quiet", "--method", "adaptive")
    assert main(small("--folder", "whole", *seeded, steps=6)) == 0
    original = Bar.__call__

    def press(bar: Bar, done: int, total: int, row: Any) -> None:
        original(bar, done, total, row)
        if done == 3:
            signal.raise_signal(kind)

    monkeypatch.setattr(Bar, "__call__", press)
    assert main(small("--folder", "parts", *seeded, steps=6)) == 130
    monkeypatch.setattr(Bar, "__call__", original)
    assert main(["train", "--resume", "parts", "--quiet"]) == 0
    first, second = (torch.load(here / name / "model.pt") for name in ("whole", "parts"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (here / "whole/metrics.jsonl").read_text() == (here / "parts/metrics.jsonl").read_text()


def test_a_resumed_comparison_keeps_what_is_finished_and_ends_as_if_it_had_not_been_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    words = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "6", "--noise-seed", "1", "--methods"]
    words += ["flat; psac; normalised", "--evaluate-every", "2", "--quiet"]
    assert main([*words, "--folder", "whole"]) == 0
    original, begun = Bar.__call__, []

    def press(bar: Bar, done: int, total: int, row: Any) -> None:
        original(bar, done, total, row)
        begun.append(done)
        if len(begun) == 6 + 3:  # in the middle of the second run
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "__call__", press)
        assert main([*words, "--folder", "parts"]) == 130
    assert "stopped; finished runs are kept: write clipwise compare --resume parts\n" in capsys.readouterr().err
    kept = (here / "parts/1-flat/model.pt").stat().st_mtime_ns
    with pytest.warns(UserWarning, match="clipwise compare --resume parts"):
        read(["parts"])
    assert "clipwise compare --resume parts" in one_line(capsys, ["report", "parts/2-psac"])
    assert "holds a comparison: write clipwise compare" in one_line(capsys, ["train", "--resume", "parts"])
    assert "holds a comparison: write clipwise compare" in one_line(capsys, ["reproduce", "--resume", "parts"])
    assert "holds one run: write clipwise train" in one_line(capsys, ["compare", "--resume", "parts/2-psac"])
    assert "nothing to resume in nowhere: expected a comparison" in one_line(capsys, ["compare", "--resume", "nowhere"])
    assert "keeps its settings, got --batch 5" in one_line(capsys, ["compare", "--resume", "parts", "--batch", "5"])
    assert main(["compare", "--resume", "parts", "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)["runs"]
    assert first["seconds"] is None and all(run["seconds"] > 0 for run in others)
    assert (here / "parts/1-flat/model.pt").stat().st_mtime_ns == kept
    for run in ("1-flat", "2-psac", "3-normalised"):
        assert Ledger(here / "parts" / run / "ledger.jsonl").releases == 6
        for name in ("metrics.jsonl", "statement.json"):
            assert (here / "parts" / run / name).read_text() == (here / "whole" / run / name).read_text()
        looks = [read([here / folder / run])[0].looks for folder in ("whole", "parts")]
        # with all methods, also after it went on
        assert [[*look["methods"]] for look in looks[0]] == [[*look["methods"]] for look in looks[1]]
    assert main(["compare", "--resume", "parts"]) == 0  # nothing is left to do: the table again
    assert "psac" in capsys.readouterr().out


def test_a_comparison_that_cannot_begin_leaves_no_folder(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    words = ["compare", "--data", "npz:data.npz", *FAST, "--steps", "6", "--folder", "none", "--batch", "1000"]
    assert "batch must be at most" in one_line(capsys, words)
    assert not (here / "none").exists()


def test_who_asks_about_an_interrupted_run_or_a_comparison_is_told_what_to_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Bar, "__call__", lambda *_: signal.raise_signal(signal.SIGINT))
        assert main(small("--folder", "all/a run", "--quiet")) == 130
    for words in (["report", "all"], ["report", "all/a run"], ["audit", "all/a run"]):
        assert "write clipwise train --resume 'all/a run', which was interrupted" in one_line(capsys, words)
    assert main(["train", "--resume", "all/a run", "--quiet"]) == 0
    assert "in all: write one of its runs, all/a run" in one_line(capsys, ["audit", "all"])


def test_an_interrupted_run_that_was_made_in_python_goes_on_there(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "own").mkdir()
    for name in ("checkpoint.pt", "ledger.jsonl"):
        (here / "own" / name).write_text("")
    for words in (["report", "own"], ["audit", "own"], ["train", "--resume", "own"]):
        assert "clipwise.train(…, folder='own', resume=True)" in one_line(capsys, words)


def test_a_run_that_was_stopped_in_its_first_step_is_resumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Private, "step", stopped)
        assert main(small("--folder", "run", "--quiet")) == 130
    assert "write clipwise train --resume run" in capsys.readouterr().err
    assert not (here / "run" / "ledger.jsonl").exists()  # nothing was released
    assert "holds one run: write clipwise train" in one_line(capsys, ["compare", "--resume", "run"])
    assert main(["train", "--resume", "run", "--quiet"]) == 0
    assert Ledger(here / "run" / "ledger.jsonl").releases == 4


def test_ctrl_c_is_heard_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    install, waiting = signal.signal, [signal.SIGINT]

    def at_once(kind: signal.Signals, handler: Any) -> Any:
        before = install(kind, handler)
        if waiting:
            signal.raise_signal(waiting.pop())
        return before

    monkeypatch.setattr(signal, "signal", at_once)
    with patient(Bar(quiet=True)) as heard:
        assert heard.is_set()


def test_a_run_that_was_written_on_a_gpu_is_resumed_without_one(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def press(bar: Bar, done: int, total: int, row: Any) -> None:
        if done == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "__call__", press)
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        words = ["--method", "dice", "--accountant", "pld"]  # faster than rdp where there is memory
        assert main(small("--folder", "run", *words, "--quiet")) == 130
    assert (here / "run" / "private-state.pt").exists()  # read, too
    assert main(["train", "--resume", "run", "--quiet"]) == 0
    assert Ledger(here / "run" / "ledger.jsonl").releases == 4


def interrupted_run(here: Path, begun: TrainConfig) -> None:
    (here / "run").mkdir()
    (here / "run" / "settings.toml").write_text(to_toml(begun))
    for name in ("checkpoint.pt", "ledger.jsonl"):
        (here / "run" / name).touch()


def test_a_resumed_run_is_told_anew_how_and_where_it_runs(here: Path) -> None:
    begun = TrainConfig(batch=20, noise_multiplier=1.0)
    interrupted_run(here, begun)
    told: dict[str, Any] = {"resume": "run", "device": "cuda:1", "tensorboard": True, "threads": 3, "json_lines": True}
    assert resumed(made(TrainConfig, told), "run") == replace(begun, **told)
    with pytest.raises(InputError, match="keeps its settings, got --folder other"):
        resumed(made(TrainConfig, told, {"folder": "other"}), "run")


@pytest.mark.parametrize(
    ("name", "value", "same"), [("data", "digits", "npz:data.npz"), ("batch", 256, 20), ("method", "flat", "psac")]
)
def test_what_a_resumed_run_is_told_must_be_its_own_setting_also_where_it_is_the_default(
    here: Path, name: str, value: Any, same: Any
) -> None:
    begun = TrainConfig(data="npz:data.npz", batch=20, noise_multiplier=1.0, method=str(METHODS["psac"]()))
    interrupted_run(here, begun)
    with pytest.raises(InputError, match=f"keeps its settings, got --{name} {value} for .*: leave it out"):
        resumed(made(TrainConfig, {"resume": "run", name: value}), "run")
    assert resumed(made(TrainConfig, {"resume": "run", name: same}), "run") == replace(begun, resume="run")


def test_how_to_go_on_says_where_the_run_was() -> None:
    assert resume_command(TrainConfig(), Path("my run")) == "clipwise train --resume 'my run'"
    there = TrainConfig(device="cuda:1", tensorboard=True)
    assert resume_command(there, Path("run")) == "clipwise train --resume run --device cuda:1 --tensorboard"
    assert resume_command(CompareConfig(), Path("runs")) == "clipwise compare --resume runs"


def test_what_was_spent_before_is_not_called_steps_of_this_run(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert main(small("--folder", "first", "--quiet")) == 0
    assert main(small("--folder", "second", "--spent", "first", steps=3)) == 0
    assert main(["report", "second"]) == 0
    page = (here / "second" / "report.html").read_text()
    for shown in (capsys.readouterr().out, page):
        assert "3 steps, and 4 releases spent before" in " ".join(shown.split())
    assert "4 × Poisson, rate 0.25, multiplier 1" in " ".join(page.split())


@pytest.mark.parametrize("words", [("--spent", "one", "--spent", "two"), ("--spent", "one", "two")])
def test_every_folder_of_what_was_spent_before_counts(words: tuple[str, ...], here: Path) -> None:
    for name, noise in (("one", "1"), ("two", "2")):
        assert main(small("--folder", name, "--noise-multiplier", noise, "--quiet")) == 0
    assert main(small("--folder", "third", "--quiet", *words)) == 0
    assert json.loads((here / "third" / "statement.json").read_text())["releases"] == 4 + 4 + 4


def test_a_second_ctrl_c_does_not_wait() -> None:
    # whoever starts the tests in the background may have told them to ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Bar(quiet=True) as bar, patient(bar) as heard:
            signal.raise_signal(signal.SIGINT)
            assert heard.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_before_the_first_step_says_that_nothing_was_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "make_private", interrupted)
    assert one_line(capsys, small(), code=130) == "stopped before the first step; nothing was trained"
    assert not (here / "runs").exists()
