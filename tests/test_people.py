"""Several rows of one person: what their ε is made of, and a run that keeps it."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

import clipwise as cw
from clipwise.accounting import Ledger, calibrate, epsilon, spent
from clipwise.cli import main
from clipwise.types import BlockGaussian, Event, Gaussian, InputError, MemoryGaussian, PoissonGaussian, Refused

SETTING = {"delta": 1e-5, "sampling_rate": 0.02, "steps": 40}


def one_release(event: PoissonGaussian | MemoryGaussian, rows: int, delta: float) -> float:
    """ε of one release by integrating both densities on a line, for the worst case: all rows push the same way."""
    x = np.linspace(-40, 60, 200_001) * event.noise_multiplier
    memory = getattr(event, "memory", 0.0)
    drawn = binom.pmf(range(rows + 1), rows, event.sampling_rate)
    among = sum(p * norm.pdf(x, memory + j, event.noise_multiplier) for j, p in enumerate(drawn))
    alone = norm.pdf(x, 0, event.noise_multiplier)

    def excess(e: float, one: np.ndarray, other: np.ndarray) -> float:
        return float(np.trapezoid(np.maximum(one - math.exp(e) * other, 0), x)) - delta

    return max(
        brentq(excess, 0, 100, args=pair) if excess(0, *pair) > 0 else 0.0 for pair in ((among, alone), (alone, among))
    )


@pytest.mark.parametrize(
    "event", [PoissonGaussian(1.0, 0.1), PoissonGaussian(3.0, 0.5), MemoryGaussian(2.0, 0.05, 0.25)], ids=str
)
@pytest.mark.parametrize("rows", [2, 3, 12])
def test_one_release_costs_a_person_what_its_densities_say(event: PoissonGaussian | MemoryGaussian, rows: int) -> None:
    exact = one_release(event, rows, 1e-5)
    assert exact <= spent([(event, 1)], 1e-5, rows_per_person=rows) <= exact * 1.01 + 0.02


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_without_sampling_rows_of_a_person_add_up(rows: int) -> None:
    for event in (PoissonGaussian(60.0, 1.0), Gaussian(60.0, "means")):
        together = spent([(event, 40)], 1e-5, rows_per_person=rows)
        assert together == pytest.approx(spent([(PoissonGaussian(60.0 / rows, 1.0), 40)], 1e-5), rel=1e-9)


@settings(max_examples=4, deadline=None)
@given(st.floats(0.8, 4.0), st.floats(0.001, 0.2), st.integers(1, 300), st.integers(2, 4))
def test_more_rows_cost_more_and_less_than_by_passing_from_one_to_the_next(
    noise: float, rate: float, steps: int, rows: int
) -> None:
    entries = [(PoissonGaussian(noise, rate), steps)]
    costs = [spent(entries, 1e-5, rows_per_person=k) for k in range(1, rows + 1)]
    assert costs == sorted(costs)
    # (ε, δ) for one row is (kε, δ (e^(kε) − 1)/(e^ε − 1)) for k of them, whatever the mechanism (Vadhan 2017, 2.2)
    for delta in (1e-6, 1e-10):
        one = spent(entries, delta)
        if 0 < one * rows < 300 and (worse := delta * math.expm1(rows * one) / math.expm1(one)) < 0.5:
            known = spent(entries, worse, rows_per_person=rows)
            assert known <= rows * one * 1.02 + 0.02


def test_releases_of_all_kinds_compose_to_whatever_a_person_has() -> None:
    kinds: list[tuple[Event, int]] = [(PoissonGaussian(2.0, 0.1), 20), (Gaussian(50.0, "means"), 1)]
    both = spent(kinds, 1e-5, rows_per_person=3)
    assert both > max(spent([kind], 1e-5, rows_per_person=3) for kind in kinds)
    assert both < sum(spent([kind], 5e-6, rows_per_person=3) for kind in kinds)


def test_calibrated_noise_keeps_epsilon_for_a_person() -> None:
    noise = calibrate(epsilon=3, rows_per_person=3, **SETTING)
    assert epsilon(noise_multiplier=noise, rows_per_person=3, **SETTING) <= 3
    assert epsilon(noise_multiplier=noise * 0.99, rows_per_person=3, **SETTING) > 3
    assert noise > calibrate(epsilon=3, **SETTING)


@pytest.mark.parametrize(
    ("rows", "accountant", "message"),
    [
        (0, "pld", "rows_per_person must be"),
        (2.5, "pld", "rows_per_person must be"),
        (1001, "pld", "keep fewer rows of each person"),
        (2, "rdp", "knows one row of a person.*write 'pld'"),
    ],
)
def test_what_cannot_be_accounted_is_an_error(rows: int, accountant: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        spent([(PoissonGaussian(1.0, 0.1), 3)], 1e-5, accountant, rows_per_person=rows)


def test_steps_by_groups_are_refused_since_a_person_may_be_in_several() -> None:
    for place in (True, False):
        with pytest.raises(Refused, match="no proof for several rows of a person in steps by groups"):
            spent([(BlockGaussian(2.0, 0.3, place), 1)], 1e-5, rows_per_person=2)
    with pytest.raises(Refused, match="no proof for several rows"):
        private(method="dice(memory='blocks', blocks=4)", noise_multiplier=2.0, rows_per_person=2)
    assert private(method="dice(memory='none')", noise_multiplier=2.0, rows_per_person=2).epsilon() == 0


def private(**changed: object) -> cw.Private:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    given = {"delta": 1e-3, "steps": 3, "batch": 10, "noise": 1, "self_test": False, **changed}
    data = (torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    return cw.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **given)  # type: ignore[arg-type]


def test_a_run_keeps_epsilon_for_a_person_and_its_statement_says_so() -> None:
    run, alone = private(epsilon=4, rows_per_person=3), private(epsilon=4)
    assert run.noise_multiplier > 1.5 * alone.noise_multiplier
    for batch in run.batches():
        run.step(batch)
    assert run.epsilon() == spent(run.ledger.entries, 1e-3, rows_per_person=3) <= 4
    assert run.ledger.epsilon(1e-3) < run.epsilon()
    statement = run.statement()
    said = " ".join(statement.text().split())
    assert statement.epsilon == run.epsilon() and statement.rows_per_person == 3
    assert "add or remove one person with at most 3 samples of the training data" in said
    assert "with any one person as without" in said and "a person with more than 3 samples" in said
    with pytest.raises(Refused, match="rows_per_person is fixed"):
        run.rows_per_person = 1


def test_what_was_spent_before_counts_for_a_person_too() -> None:
    before = Ledger()
    before.record(Gaussian(20.0, "means"))
    with pytest.raises(InputError, match="is spent: what was released before costs"):
        private(epsilon=before.epsilon(1e-3) * 1.5, spent=before, rows_per_person=3)
    assert private(epsilon=before.epsilon(1e-3) * 1.5, spent=before).noise_multiplier > 0


def test_noise_that_drowns_a_run_since_nearly_all_is_spent_is_warned_of() -> None:
    before = Ledger()
    before.record(Gaussian(4.0, "means"))
    cost = before.epsilon(1e-3)
    with pytest.warns(UserWarning, match="so that little is left: these steps get a noise multiplier of"):
        private(epsilon=cost * 1.001, spent=before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private(epsilon=cost * 2, spent=before)


def test_the_command_keeps_it_through_train_resume_report_and_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    given = (
        "--data digits?train=200&test=50 --model mlp(hidden=8) --epochs 1 --batch 50 --epsilon 5 --rows-per-person 2"
    )
    folder = tmp_path / "run"
    assert main(["train", *given.split(), "--folder", str(folder), "--quiet", "--diagnose-every", "0"]) == 0
    statement = json.loads((folder / "statement.json").read_text())
    assert statement["rows_per_person"] == 2 and statement["epsilon"] <= 5
    assert Ledger(folder / "ledger.jsonl").epsilon(1e-5) < statement["epsilon"]
    assert main(["report", str(folder), "--folder", str(tmp_path / "report")]) == 0
    assert "steps, for a person with at most 2 samples" in (tmp_path / "report" / "report.html").read_text()
    assert "δ = 1e-05, for a person with at most 2 samples." in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "report" / "report.json").read_text())["runs"][0]["rows_per_person"] == 2
    assert main(["audit", str(folder), "--trials", "1280", "--canaries", "100", "--noise-seed", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the ledger’s ε is for whoever has at most 2 samples, an attack’s for one sample" in said
    statement["rows_per_person"] = 3  # whose ε would be larger
    (folder / "statement.json").write_text(json.dumps(statement))
    capsys.readouterr()
    assert main(["report", str(folder), "--folder", str(tmp_path / "again")]) != 0
    assert "and its statement says" in capsys.readouterr().err


def test_a_comparison_says_for_whom_its_epsilons_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    given = "--data digits?train=200&test=50 --model mlp(hidden=8) --steps 2 --batch 50 --noise-multiplier 4"
    for words in (["--rows-per-person", "2"], []):
        folder = tmp_path / f"run{len(words)}"
        assert main(["compare", *given.split(), "--methods", "flat; psac", *words, "--folder", str(folder)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("δ = 1e-05, for a person with at most 2 samples. Own bias" in said) == bool(words)
        page = (folder / "report.html").read_text()
        assert ("</strong> at δ = 1e-05, for a person with at most 2 samples.</p>" in page) == bool(words)
        assert ("</strong> at δ = 1e-05.</p>" in page) == (not words)


def test_calibrate_says_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--sampling-rate 0.02 --steps 40 --noise-multiplier 2".split()
    assert main(["calibrate", *given, "--rows-per-person", "4"]) == 0
    out = capsys.readouterr().out
    assert "one person with at most 4 samples" in out
    assert main(["calibrate", *given, "--json", "--rows-per-person", "4"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows_per_person"] == 4
    assert values["epsilon"] == epsilon(noise_multiplier=2, rows_per_person=4, **SETTING)
