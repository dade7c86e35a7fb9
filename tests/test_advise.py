"""The advisor: it never reads private gradients silently, accounts for what it reads, and its advice is the best one.

Receives: small files of data whose private rows carry a mark.
Gives: that without ``--spend`` no private row reaches a loss, that with it the ledger holds the cost, and that the
method and clip norm are those of the definition, computed here from gradients written out in float64.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipwise import advice, methods
from clipwise.accounting import Ledger, spent
from clipwise.cli import advise, main
from clipwise.cli.options import read
from clipwise.cli.parts import loss_of, network, resolved
from clipwise.config import TrainConfig
from clipwise.data import Arrays, load
from clipwise.losses import cross_entropy
from clipwise.records import oracle, per_sample
from clipwise.report.plots import plotted
from clipwise.types import Gaussian, InputError, PoissonGaussian

MARK = 77.0  # in every private row
PLAN = ["--model", "mlp(hidden=8)", "--accountant", "rdp", "--delta", "1e-3", "--batch", "40", "--steps", "5"]
PLAN += ["--threads", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with private data, which is marked, and public data like it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        advise, "plotted", lambda figures, folder: []
    )  # which takes longer than all else; one test has it
    draw = np.random.RandomState(0)
    for name, mark in (("private", MARK), ("public", 0.0)):
        y = draw.randint(0, 3, 150)
        x = 2 * np.eye(5)[y] + draw.randn(150, 5) * draw.choice([0.3, 3.0], (150, 1))
        x[:, 4] = mark
        np.savez(f"{name}.npz", x=x.astype("float32"), y=y)
    return tmp_path


def advised(*words: str, folder: str = "advice") -> dict[str, Any]:
    assert main(["advise", "--data", "npz:private.npz", *PLAN, *words, "--folder", folder]) == 0
    return json.loads(Path(folder, "advice.json").read_text())


def counts(*of: Any) -> Tensor:
    """The histogram of private norms, as only a test may see it."""
    (part,) = advice.histogram(*of).parts
    assert (part.bound, part.share) == (1, 1)
    return part.value["counts"]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every loss raises at a private row; what is given counts the rows that it saw."""
    seen: list[int] = []

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        seen.append(len(batch[0]))
        if bool((batch[0] == MARK).any()):
            raise PermissionError("a private row reached the loss")
        return cross_entropy(model, batch)

    monkeypatch.setattr(advise, "loss_of", lambda splits: loss)
    return seen


# it never reads private gradients silently


@pytest.mark.parametrize("words", [[], ["--public", "npz:public.npz", "--warm-up", "4"]], ids=["random", "public"])
def test_without_a_budget_no_private_row_reaches_a_loss(words: list[str], poisoned: list[int]) -> None:
    found = advised(*words, "--noise-multiplier", "1")
    assert poisoned, "something was looked at"
    assert found["epsilon_spent"] == 0 and not Path("advice/ledger.jsonl").exists()
    assert ("public data" if words else "random inputs") in found["measured_on"]


def test_with_a_budget_private_rows_are_read_so_that_the_test_above_can_fail(poisoned: list[int]) -> None:
    with pytest.raises(PermissionError):
        advised("--spend", "0.5", "--epsilon", "3")


@pytest.mark.parametrize("words", [[], ["--public", "npz:public.npz", "--warm-up", "4"]], ids=["random", "public"])
def test_the_advice_is_the_same_whatever_the_private_values_are(words: list[str]) -> None:
    words = [*words, "--noise-multiplier", "1"]
    before = advised(*words, folder="before")
    private = dict(np.load("private.npz"))
    np.savez("private.npz", x=-100 * private["x"] ** 2, y=2 - private["y"])
    assert advised(*words, folder="after") == before


def test_public_and_a_budget_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--data", "npz:private.npz", "--public", "npz:public.npz", "--spend", "1"]) == 2
    assert "expected --public or --spend, got both" in capsys.readouterr().err


def test_what_was_read_is_said_in_words_and_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    advised()
    said = " ".join(capsys.readouterr().out.split())
    for text in (said, Path("advice/advice.html").read_text()):
        assert "Nothing was read of the private data but its shape and size: no privacy was spent." in text


# what it reads is accounted for


def test_the_ledger_holds_one_release_that_costs_what_may_be_spent() -> None:
    found = advised("--spend", "0.5", "--epsilon", "3")
    with Ledger("advice/ledger.jsonl") as ledger:
        ((event, count),) = ledger.entries
    assert isinstance(event, Gaussian) and event.what == advise.WHAT and count == 1
    cost = spent([(event, 1)], 1e-3, "rdp")
    assert found["epsilon_spent"] == cost and 0.49 < cost <= 0.5


def test_the_advised_run_counts_the_advice_so_that_both_keep_the_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised("--spend", "0.5", "--epsilon", "3")
    assert found["epsilon_with_run"] == 3 and "it is 3.000 together" in " ".join(capsys.readouterr().out.split())
    words = shlex.split(found["command"])
    assert main([*words[1:], "--json", "--folder", "run"]) == 0
    stated = json.loads(capsys.readouterr().out)["statement"]
    assert [each["what"] for each in stated["spent_before"]] == [advise.WHAT]
    assert (stated["steps"], stated["releases"]) == (5, 6)
    with Ledger("advice/ledger.jsonl") as ledger:
        ((event, _),) = ledger.entries
    train = len(load("npz:private.npz").train)
    run = (PoissonGaussian(stated["noise_multiplier"], 40 / train), 5)
    assert stated["epsilon"] == pytest.approx(spent([(event, 1), run], 1e-3, "rdp"), rel=1e-9)
    assert 2.97 < stated["epsilon"] <= 3


def test_a_run_planned_by_its_noise_costs_what_both_cost_together() -> None:
    found = advised("--spend", "0.5", "--noise-multiplier", "2")
    with Ledger("advice/ledger.jsonl") as ledger:
        entries = ledger.entries
    train = len(load("npz:private.npz").train)
    together = spent([*entries, (PoissonGaussian(2.0, 40 / train), 5)], 1e-3, "rdp")
    assert found["epsilon_with_run"] == pytest.approx(together, rel=1e-9)


def test_the_release_is_in_the_ledger_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used = advise.median

    def looking(counts: Tensor) -> float:
        with Ledger("advice/ledger.jsonl") as ledger:
            assert ledger.releases == 1
        return used(counts)

    monkeypatch.setattr(advise, "median", looking)
    advised("--spend", "0.5", "--epsilon", "3")


def test_what_is_used_is_the_histogram_with_that_much_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = load("npz:private.npz")
    model = network(_plan(), splits).model
    true = counts(model, loss_of(splits), splits.train, 256)
    released: list[Tensor] = []
    monkeypatch.setattr(advise, "median", lambda counts: released.append(counts) or 1.0)
    for trial in range(15):
        words = ["--spend", "0.5", "--noise-multiplier", "1", "--noise-seed", str(trial)]
        advised(*words, folder=f"advice-{trial}")
    with Ledger("advice-0/ledger.jsonl") as ledger:
        sigma = ledger.entries[0][0].noise_multiplier
    # where nobody is, the count is noise cut off at zero: E[max(0, σz)²] = σ²/2, whose square deviates by √5 of it
    empty = torch.stack(released)[:, true == 0]
    close = 4 * math.sqrt(5 / empty.numel())
    assert close < 0.7 and float(empty.square().mean()) == pytest.approx(sigma**2 / 2, rel=close)
    assert float(torch.stack(released).mean(0)[true.argmax()]) == pytest.approx(float(true.max()), abs=sigma)


@given(st.integers(0, 29))
def test_removing_one_sample_moves_one_count_by_one(gone: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = 10 ** torch.randn(30, 5, generator=draw), torch.randint(3, (30,), generator=draw)
    x[3] = 3e38  # its norm is not finite, so that it is in no bin
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    rest = torch.arange(30) != gone
    before = counts(model, cross_entropy, Arrays((x, y)), 7)
    after = counts(model, cross_entropy, Arrays((x[rest], y[rest])), 7)
    assert float(before.sum()) == 29 and float((before - after).norm()) == (0 if gone == 3 else 1)


@given(st.lists(st.floats(0, 1e3), min_size=len(advice.EDGES) + 1, max_size=len(advice.EDGES) + 1))
def test_the_advised_norm_has_half_of_the_counts_on_either_side(counts: list[float]) -> None:
    found = advice.median(torch.tensor(counts, dtype=torch.float64))
    edges = (0.0, *advice.EDGES, math.inf)
    assert advice.EDGES[0] <= found <= advice.EDGES[-1]
    half = sum(counts) / 2
    below = sum(c for c, high in zip(counts, edges[1:], strict=True) if high <= found * 0.94)  # it has two digits
    above = sum(c for c, low in zip(counts, edges, strict=False) if low >= found * 1.06)
    assert below <= half + 1e-6 and above <= half + 1e-6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--spend", "3", "--epsilon", "3"],
            "--spend must be less than the ε of the planned run, 3, got 3: write --spend",
        ),
        (["--spend", "-1"], "spend must be"),
        (["--public", "npz:other.npz"], "--public must be like --data, [5] with 3 outputs, got [2] with 2"),
        (["--folder", "."], "the folder . is not empty: choose another"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("other.npz", x=np.zeros((20, 2), "float32"), y=np.arange(20) % 2)
    assert main(["advise", "--data", "npz:private.npz", *PLAN, *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and said in output.err and output.err.count("\n") == 1
    assert not list(Path().rglob("ledger.jsonl"))


# the advice is the best by definition


def _plan() -> TrainConfig:
    words = {"data": "npz:private.npz", "model": "mlp(hidden=8)", "epsilon": 3.0, "delta": 1e-3, "accountant": "rdp"}
    return resolved(TrainConfig(**words, batch=40, steps=5))  # type: ignore[arg-type]


def _written_out(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Every sample's gradient in float64. [sample, parameter]."""
    found = oracle.per_sample(model, cross_entropy, batch)
    rows = torch.eye(len(batch[0]), dtype=torch.float64)
    return torch.stack([torch.cat([part.flatten() for part in found.weighted_sum(row).values()]) for row in rows])


def _alignment(gradients: Tensor, method: methods.Method, sigma: float) -> tuple[float, float]:
    """cos(g̃, ĝ) · ‖g̃‖/√(‖g̃‖² + noise²) and the direction error, from their definitions."""
    true = gradients.mean(0)
    clipped = (method.weigh(gradients.norm(dim=1))[:, None] * gradients).mean(0)
    noise = sigma * method.bound * math.sqrt(gradients.shape[1]) / 40
    length = float(clipped.norm())
    cosine = float(clipped @ true) / (length * float(true.norm())) if length else 0.0
    return cosine * length / math.hypot(length, noise), math.sqrt(max(0.0, 1 - cosine**2)) if length else 0.0


@pytest.mark.parametrize("sigma", [0.05, 1.0, 8.0])
def test_the_recommendation_is_the_best_by_its_definition(sigma: float) -> None:
    found = advised("--public", "npz:public.npz", "--warm-up", "0", "--noise-multiplier", str(sigma))
    public = load("npz:public.npz")
    model = network(replace(_plan(), epsilon=None, noise_multiplier=sigma), public).model
    gradients = _written_out(model, public.train.rows(torch.arange(len(public.train))))
    assert found["measured_on"].startswith(f"{len(gradients)} samples")
    known: dict[str, dict[float, tuple[float, float]]] = {}
    for option in found["options"]:
        family = option["method"].partition("(")[0]
        make: Callable[..., methods.Method] = methods.METHODS[family]
        clips = advice._clips([float(gradients.norm(dim=1).max())])
        known[family] = {clip: _alignment(gradients, make(clip_norm=clip), sigma) for clip in clips}
        value, bias = known[family][option["clip_norm"]]
        assert option["alignment"] == pytest.approx(value, rel=2e-4) and option["bias"] == pytest.approx(bias, abs=1e-3)
    assert set(known) == set(advice.FAMILIES)
    most = {family: max(value for value, _ in each.values()) for family, each in known.items()}
    for option in found["options"]:  # a family's clip norm: the largest that is as good as its best one
        family = option["method"].partition("(")[0]
        good = [clip for clip, (value, _) in known[family].items() if value >= 0.97 * most[family]]
        assert option["scale_free"] == (min(v for v, _ in known[family].values()) > 0.999 * most[family])
        assert option["scale_free"] or option["clip_norm"] == max(good)
    own = {option["method"].partition("(")[0]: option for option in found["options"]}
    best = max(option["alignment"] for option in found["options"])
    pick = next(family for family in advice.FAMILIES if own[family]["alignment"] >= 0.97 * best)
    assert (found["method"], found["clip_norm"]) == (own[pick]["method"], own[pick]["clip_norm"])
    assert [option["alignment"] for option in found["options"]] == sorted(o["alignment"] for o in own.values())[::-1]


def test_more_noise_asks_for_no_larger_clip_norm() -> None:
    clips = []
    for number, sigma in enumerate((0.05, 8.0)):
        words = ["--public", "npz:public.npz", "--warm-up", "0", "--noise-multiplier", str(sigma)]
        options = advised(*words, folder=f"advice-{number}")["options"]
        clips.append(next(option["clip_norm"] for option in options if option["method"].startswith("flat(")))
    assert clips[0] > clips[1]


# the page and the command


def test_the_advised_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised("--public", "npz:public.npz", "--warm-up", "2", "--epsilon", "3")
    words = shlex.split(found["command"])
    assert words[:2] == ["clipwise", "train"] and words[words.index("--method") + 1] == found["method"]
    capsys.readouterr()
    assert main([*words[1:], "--json", "--folder", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["statement"]["method"] == found["method"]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--epsilon", "3"], {"epsilon": 3.0}),
        (
            ["--noise-multiplier", "1.25", "--chunk", "64", "--seed", "7", "--device", "cpu", "--noise-seed", "5"],
            {"noise_multiplier": 1.25, "chunk": 64, "seed": 7},
        ),
    ],
    ids=["few", "many"],
)
def test_the_advised_command_gives_back_every_setting_of_the_planned_run(
    words: list[str], settings: dict[str, Any]
) -> None:
    found = advised(*words)
    _, _, *typed = shlex.split(found["command"])
    run = read("train", TrainConfig, typed, "")
    assert isinstance(run, TrainConfig) and run.learning_rate is not None
    assert run.learning_rate == pytest.approx(0.5 / found["clip_norm"], rel=0.05)
    planned = {"model": "mlp(hidden=8)", "accountant": "rdp", "delta": 1e-3, "batch": 40, "steps": 5, "threads": 1}
    assert run == TrainConfig(
        data="npz:private.npz",
        method=found["method"],
        learning_rate=run.learning_rate,
        **planned,  # type: ignore[arg-type]
        **settings,  # and no seed for the run's noise
    )


def test_the_advised_command_for_tokens_runs() -> None:
    draw = np.random.RandomState(0)
    np.savez("tokens.npz", x=draw.randint(0, 9, (60, 6)), y=draw.randint(0, 2, 60))
    model = ["--data", "npz:tokens.npz", "--model", "lstm_classifier", "--vocabulary", "9"]
    assert main(["advise", *model, *PLAN[2:], "--samples", "32", "--noise-multiplier", "1", "--folder", "advice"]) == 0
    _, *typed = shlex.split(json.loads(Path("advice/advice.json").read_text())["command"])
    assert main([*typed, "--folder", "run", "--quiet"]) == 0


def test_the_page_says_method_reason_command_and_every_options_numbers() -> None:
    found = advised("--public", "npz:public.npz", "--warm-up", "2")
    text = Path("advice/advice.html").read_text()
    assert f"Begin with <b>{found['method']}</b>" in text and found["reason"] in text.replace("&#x27;", "'")
    table = text[text.index("<table>") : text.index("</table>")]
    for option in found["options"]:
        name = option["method"].partition("(")[0].strip("_")
        row = table[table.index(f"<th scope=row>{name}</th>") :].partition("</tr>")[0]
        for number in (f"{option['alignment']:.3f}", f"{option['bias']:.1%}", f"{option['clipped']:.0%}"):
            assert f"<td class=num>{number}</td>" in row
    assert [figure in text for figure in ('<figure id="advice"', '<figure id="norms"')] == [True, True]


def test_the_figures_are_also_written_for_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "plotted", plotted)
    advised("--noise-multiplier", "1")
    assert {path.name for path in Path("advice/plots").iterdir()} == {
        "advice.png",
        "advice.svg",
        "norms.png",
        "norms.svg",
    }


@pytest.mark.parametrize("task", ["regression", "tokens"])
def test_numbers_to_guess_and_tokens_have_a_random_proxy_too(task: str) -> None:
    draw = np.random.RandomState(0)
    if task == "tokens":
        np.savez("other.npz", x=draw.randint(0, 9, (60, 6)), y=draw.randint(0, 2, 60))
        words = ["--data", "npz:other.npz", "--model", "lstm_classifier", "--vocabulary", "9"]
    else:
        np.savez("other.npz", x=draw.randn(60, 4).astype("float32"), y=draw.rand(60).astype("float32"))
        words = ["--data", "npz:other.npz?task=regression", "--model", "mlp(hidden=4)"]
    assert main(["advise", *words, *PLAN[2:], "--samples", "32", "--noise-multiplier", "1", "--folder", "advice"]) == 0
    found = json.loads(Path("advice/advice.json").read_text())
    assert found["measured_on"].startswith("32 samples of random inputs") and found["options"][0]["alignment"] > 0


def test_a_second_advice_carries_what_the_first_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--data", "digits", "--epsilon", "3", "--delta", "1e-4", "--noise-seed", "0", "--json"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*words, "--spend", "0.2", "--folder", str(first)]) == 0
    assert main([*words, "--spend", "0.3", "--spent", str(first), "--folder", str(second)]) == 0
    capsys.readouterr()
    before, after = (Ledger(folder / "ledger.jsonl").entries for folder in (first, second))
    assert after[0] == before[0] and len(after) == 2


@pytest.mark.parametrize(("other", "said"), [(0.17, True), (0.12, False)])
def test_methods_that_hardly_differ_are_said_not_to(other: float, said: bool) -> None:
    options = tuple(
        advice.Option(f"{name}(clip_norm=1.0)", 1.0, at, 0.1, 2.0, 0.5, False)
        for name, at in (("flat", 0.172), ("psac", other))
    )
    found = advice.Comparison((1.0,), {}, options, 1, (), ())
    assert ("No method stands out" in found.reason) == said


# from Python


def test_compared_gives_what_the_command_says() -> None:
    found = advised("--public", "npz:public.npz", "--warm-up", "0", "--noise-multiplier", "1")
    public = load("npz:public.npz")
    model = network(_plan(), public).model
    gradients = per_sample(model, cross_entropy, public.train.rows(torch.arange(len(public.train))))
    own = advice.compared([gradients], noise_multiplier=1.0, expected_batch=40.0)
    assert (own.pick.method, own.reason) == (found["method"], found["reason"])
    assert list(own.alignment) == list(advice.FAMILIES)
    assert all(len(values) == len(own.clips) for values in own.alignment.values())
    assert sum(own.norm_counts) == len(public.train)


def test_nothing_to_look_at_is_said() -> None:
    with pytest.raises(InputError, match="expected gradients to look at, got none"):
        advice.compared([], noise_multiplier=1.0, expected_batch=1.0)
