"""Accounting against closed forms, published values and dp-accounting itself; the ledger against crashes.

Receives: the package clipwise.accounting.
Gives: sentences that hold.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import dp_event, pld, rdp
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr

import clipwise.types
from clipwise.accounting import Ledger, as_dp_event, calibrate, epsilon, events, selection
from clipwise.accounting.events import DISCRETISATION, discretisation, spent
from clipwise.accounting.ledger import KINDS, totals
from clipwise.types import BlockGaussian, Event, Gaussian, InputError, MemoryGaussian, PoissonGaussian, Refused

CIFAR = {"delta": 1e-5, "sampling_rate": 0.04, "steps": 1500}
# B = 2000 and 60 epochs: q = B / N, T = 60 N / B to the nearest step
SETTINGS = {
    "cifar10": CIFAR,
    "svhn": {"delta": 1e-5, "sampling_rate": 2000 / 73257, "steps": 2198},
    "imdb": {"delta": 1e-5, "sampling_rate": 0.08, "steps": 750},
}
PUBLISHED = {
    "cifar10": {4: 1.848, 5: 1.577, 6: 1.396, 7: 1.267, 8: 1.170},
    "svhn": {4: 1.575, 5: 1.356, 6: 1.211, 7: 1.108, 8: 1.030},
    "imdb": {4: 2.518, 5: 2.120, 6: 1.852, 7: 1.662, 8: 1.517},
}


def directly(accountant, noise_multiplier, delta, sampling_rate, steps):
    event = dp_accounting.PoissonSampledDpEvent(sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant.compose(event, steps)
    return accountant.get_epsilon(delta)


def closed_form(noise_multiplier, delta, steps):
    """ε of unsampled Gaussians, from δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = √T/σ."""
    mu = math.sqrt(steps) / noise_multiplier

    def excess(e):  # by logarithms: e^ε overflows above 709
        return math.exp(log_ndtr(mu / 2 - e / mu)) - math.exp(e + log_ndtr(-mu / 2 - e / mu)) - delta

    return brentq(excess, 0, mu * mu / 2 + 40 * mu, xtol=1e-13)


# --- events ---------------------------------------------------------------------------------------------------------


def test_a_release_becomes_a_poisson_sampled_gaussian():
    assert as_dp_event(PoissonGaussian(1.5, 0.1)) == dp_accounting.PoissonSampledDpEvent(
        0.1, dp_accounting.GaussianDpEvent(1.5)
    )


def test_a_release_of_everyone_is_a_plain_gaussian():
    assert as_dp_event(PoissonGaussian(1.5, 1)) == dp_accounting.GaussianDpEvent(1.5)


class Shuffled(PoissonGaussian):
    """Something that looks like a Poisson sample and is none."""


@pytest.mark.parametrize("event", [None, "gaussian", dp_accounting.GaussianDpEvent(1.0), Shuffled(1.0, 0.1)])
def test_an_event_without_a_proof_is_refused_with_what_to_write(event):
    for use in (as_dp_event, Ledger().record, lambda e: spent([(e, 1)], 1e-5)):
        with pytest.raises(Refused, match="write PoissonGaussian"):
            use(event)


def test_statistics_of_the_data_are_a_gaussian_release_that_composes_with_the_steps():
    statistics, steps = Gaussian(10.0, "means of the features"), (PoissonGaussian(2.0, 0.1), 20)
    assert as_dp_event(statistics) == dp_accounting.GaussianDpEvent(10.0)
    accountant = pld.PLDAccountant()
    accountant.compose(as_dp_event(steps[0]), 20).compose(dp_accounting.GaussianDpEvent(10.0))
    assert spent([(statistics, 1), steps], 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert spent([(statistics, 1), steps], 1e-5) > spent([steps], 1e-5)


@pytest.mark.parametrize("count", [-1, 2.5, True, "3"])
def test_a_count_that_is_none_is_an_error_and_takes_nothing_off(count):
    event = PoissonGaussian(1.0, 0.1)
    for use in (lambda e: spent(e, 1e-5), lambda e: selection(e, 1e-5, runs=3), Ledger().extend):
        with pytest.raises(InputError, match="count must be a whole number of at least 0"):
            use([(event, 100), (event, count)])


def test_what_was_released_no_times_costs_nothing():
    none, some = (Gaussian(1.0, "means"), 0), (PoissonGaussian(1.0, 0.1), 5)
    assert spent([some, none], 1e-5) == spent([some], 1e-5) > 0
    assert spent([none], 1e-5) == selection([none], 1e-5, runs=3) == 0.0


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Gaussian(0.0, "means"), "noise_multiplier must be"),
        (Gaussian(1.0, " "), "what must say in a few words"),
        (Gaussian(1.0, "two\nlines"), "what must say in a few words"),
        (Gaussian(1.0, 3), "what must say in a few words"),  # type: ignore[arg-type]
        (MemoryGaussian(1.0, 0.1, -1.0), "memory must be a number of at least 0"),
        (MemoryGaussian(1.0, 0.1, math.nan), "memory must be"),
        (BlockGaussian(1.0, 1.5, True), "sampling_rate must be"),
        (BlockGaussian(1.0, 0.5, 1), "begins must be True or False, got 1"),  # type: ignore[arg-type]
    ],
)
def test_other_events_with_impossible_values_are_errors_too(event, message):
    for use in (as_dp_event, Ledger().record):
        with pytest.raises(InputError, match=message):
            use(event)


@pytest.mark.parametrize(
    "event", [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (10**400, 0.1), (1.0, 0.0), (1.0, 1.5), (1.0, math.nan)]
)
def test_an_event_with_impossible_numbers_is_an_error(event):
    with pytest.raises(InputError, match="must be"):
        as_dp_event(PoissonGaussian(*event))


# --- epsilon --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [
        (1.848, 0.04, 1500),
        (1.0, 0.01, 300),
        (6.0, 0.5, 20),
        (1.0, 0.01, 100_000),
        (0.5, 0.1, 3),  # these three have long tails, or ε in one: most of their cells are left out
        (0.8, 0.01, 1),
        (1.0, 0.999, 1),
    ],
)
def test_epsilon_agrees_with_dp_accounting_called_directly(noise, rate, steps):
    case = {"noise_multiplier": noise, "delta": 1e-5, "sampling_rate": rate, "steps": steps}
    tight, loose = directly(pld.PLDAccountant(), **case), directly(rdp.RdpAccountant(), **case)
    assert epsilon(**case) == pytest.approx(tight, rel=1e-6)
    assert epsilon(**case) >= tight
    assert loose <= epsilon(**case, accountant="rdp") <= loose * (1 + 1e-6)
    assert epsilon(**case) < loose


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (4.0, 1), (20.0, 400), (300.0, 100_000)])
def test_without_sampling_epsilon_is_the_closed_form(noise, steps, delta):
    true = closed_form(noise, delta, steps)
    got = epsilon(noise_multiplier=noise, delta=delta, sampling_rate=1, steps=steps)
    assert true - 1e-9 <= got <= true * 1.0001 + 1e-6


@pytest.mark.parametrize("noise", [0.2, 0.05, 0.01, 0.002])
def test_little_noise_is_accounted_on_a_coarser_grid_and_still_bounds_the_closed_form(noise):
    assert discretisation([(PoissonGaussian(noise, 1.0), 1)]) > DISCRETISATION
    true = closed_form(noise, 1e-5, 1)
    started = time.process_time()
    got = epsilon(noise_multiplier=noise, delta=1e-5, sampling_rate=1, steps=1)
    assert true <= got <= true * 1.01
    assert time.process_time() - started < 10


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-4, 1e-30, 5e-324])
def test_noise_that_protects_nothing_costs_infinity(noise, accountant):
    case = {"noise_multiplier": noise, "delta": 1e-5, "sampling_rate": 0.1, "steps": 10}
    assert epsilon(**case, accountant=accountant) == math.inf


def test_usual_runs_are_accounted_on_the_stated_grid():
    for noise, rate, steps in [(0.5, 0.04, 1500), (1.0, 0.01, 100_000), (20.0, 1.0, 1000), (100.0, 0.001, 1)]:
        assert discretisation([(PoissonGaussian(noise, rate), steps)]) == DISCRETISATION


@pytest.mark.parametrize(
    ("data", "target", "noise"), [(data, *pair) for data, row in PUBLISHED.items() for pair in row.items()]
)
def test_the_published_noise_multipliers_give_their_epsilon(data, target, noise):
    assert target * 0.995 <= epsilon(noise_multiplier=noise, **SETTINGS[data]) <= target


few = settings(max_examples=5, deadline=None)
noises, rates, counts = st.floats(2, 20), st.floats(0.01, 0.5), st.integers(1, 20)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@few
@given(noises, rates, counts)
def test_epsilon_falls_with_noise_and_grows_with_rate_and_steps(accountant, noise, rate, steps):
    def cost(noise, rate, steps):
        return epsilon(noise_multiplier=noise, delta=1e-5, sampling_rate=rate, steps=steps, accountant=accountant)

    here = cost(noise, rate, steps)
    assert cost(noise * 1.2, rate, steps) <= here + 1e-9
    assert cost(noise, rate * 1.2, steps) >= here - 1e-9
    assert cost(noise, rate, steps + 1) >= here - 1e-9


@few
@given(noises, rates, counts)
def test_pld_is_never_looser_than_rdp(noise, rate, steps):
    case = {"noise_multiplier": noise, "delta": 1e-5, "sampling_rate": rate, "steps": steps}
    assert epsilon(**case) <= epsilon(**case, accountant="rdp")


@pytest.mark.parametrize(("noise", "rate"), [(1e8, 0.5), (1e8, 0.01), (1e5, 1e-6)])
def test_so_much_noise_that_its_divergence_is_rounded_away_is_not_taken_for_no_cost_at_all(noise, rate):
    """One release: δ(0) is the distance of its two distributions, q (2Φ(1/2σ) − 1), which is above this δ."""
    delta = 0.5 * rate * math.erf(1 / (2 * noise) / math.sqrt(2))
    assert directly(rdp.RdpAccountant(), noise, delta, rate, 1) == 0  # what dp-accounting says
    assert epsilon(noise_multiplier=noise, delta=delta, sampling_rate=rate, steps=1, accountant="rdp") > 0


def test_a_delta_below_the_rounding_of_pld_is_an_error_that_names_rdp():
    case = {"noise_multiplier": 300.0, "delta": 1e-14, "sampling_rate": 0.5, "steps": 100_000}
    with pytest.raises(InputError, match=r"delta must be at least 2e-10 .* write accountant 'rdp'"):
        epsilon(**case)
    assert 0 < epsilon(**case, accountant="rdp") < math.inf


def test_the_rounding_of_pld_over_many_releases_is_kept_back_from_delta():
    # Everyone takes part but for one in a billion: the closed form holds, yet the releases are composed by FFT.
    case = {"noise_multiplier": 300.0, "delta": 2.5e-10, "sampling_rate": 1 - 1e-9, "steps": 100_000}
    assert epsilon(**case) == pytest.approx(closed_form(300.0, 1.5e-10, 100_000), rel=2e-3)
    assert epsilon(**case) > max(closed_form(300.0, 2.5e-10, 100_000), directly(pld.PLDAccountant(), **case))


def test_a_hundred_thousand_steps_take_about_a_second():
    started = time.process_time()  # of this process alone: the machine may be busy with other things
    got = epsilon(noise_multiplier=1.0, delta=1e-5, sampling_rate=0.01, steps=100_000)
    assert got == pytest.approx(25.573, abs=1e-3)
    assert time.process_time() - started < 5  # 0.4 s on an idle machine


@pytest.mark.parametrize(("noise", "rate"), [(0.25, 1 - 2**-53), (0.35, 1 - 1e-13), (1e200, 0.5), (1e160, 1.0)])
def test_numbers_at_their_ends_cost_what_their_neighbours_do(noise, rate):
    got = epsilon(noise_multiplier=noise, delta=1e-5, sampling_rate=rate, steps=5)
    assert got == epsilon(noise_multiplier=min(noise, 1e100), delta=1e-5, sampling_rate=round(rate, 9), steps=5)


def test_of_long_tails_few_cells_are_computed(monkeypatch):
    asked = []
    cell = GaussianPrivacyLoss.inverse_privacy_loss
    monkeypatch.setattr(GaussianPrivacyLoss, "inverse_privacy_loss", lambda *loss: asked.append(1) or cell(*loss))
    for name in ("_epsilon", "_loss"):
        getattr(events, name).cache_clear()
    epsilon(noise_multiplier=1.0, delta=1e-5, sampling_rate=0.01, steps=100_000)
    assert 1000 < len(asked) < 30_000  # of 113,000


@pytest.mark.parametrize("loss", [-3.0, -0.3, -0.01, 0.01, 0.3, 3.0])
def test_one_release_is_on_fewer_cells_what_dp_accounting_makes_it_or_just_above(loss):
    # below 0 adding a sample costs more, above it removing one
    mine = events._loss(events.Cost(0.6, 0.1, 0.0), DISCRETISATION).get_delta_for_epsilon(loss)
    theirs = pld.privacy_loss_distribution.from_gaussian_mechanism(0.6, sampling_prob=0.1).get_delta_for_epsilon(loss)
    assert theirs * (1 - 1e-12) <= mine <= theirs * (1 + 1e-5)


def test_the_warnings_of_rdp_are_silenced_and_logging_is_left_as_it_was(caplog):
    epsilon(noise_multiplier=0.5, delta=1e-5, sampling_rate=0.04, steps=10, accountant="rdp")
    assert not caplog.records
    directly(rdp.RdpAccountant(), 0.5, 1e-5, 0.04, 10)
    assert caplog.records


BAD = [
    ("noise_multiplier", 0),
    ("noise_multiplier", "1"),
    ("delta", 0.0),
    ("delta", 1.0),
    ("sampling_rate", 0),
    ("sampling_rate", 1.01),
    ("steps", 0),
    ("steps", 1.5),
    ("steps", True),
    ("epsilon", 0),
    ("epsilon", -1.0),
    ("epsilon", math.nan),
    ("epsilon", math.inf),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_input_is_an_error_of_one_line_that_names_it(name, value):
    uses = [(calibrate, {"epsilon": 4.0, **CIFAR}), (epsilon, {"noise_multiplier": 2.0, **CIFAR})]
    for use, arguments in uses:
        if name in arguments:
            with pytest.raises(InputError, match=f"^{name} must be [^\n]*$"):
                use(**{**arguments, name: value})


def test_an_unknown_accountant_is_an_error_that_names_the_nearest():
    for use, arguments in [(calibrate, {"epsilon": 4.0}), (epsilon, {"noise_multiplier": 2.0})]:
        with pytest.raises(InputError, match="unknown accountant 'plt': did you mean 'pld'"):
            use(**arguments, **CIFAR, accountant="plt")
    with pytest.raises(InputError, match="unknown accountant"):
        Ledger().epsilon(1e-5, "gdp")


# --- calibrate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", SETTINGS)
def test_calibrate_gives_the_published_noise_multiplier(data):
    assert calibrate(epsilon=4, **SETTINGS[data]) == pytest.approx(PUBLISHED[data][4], abs=0.005)


@pytest.mark.parametrize(
    ("target", "rate", "steps", "accountant"),
    [
        (0.01, 0.04, 1500, "pld"),
        (100, 0.04, 1500, "pld"),
        (1, 0.001, 100_000, "pld"),
        (0.01, 1, 1, "pld"),
        (100, 1, 1, "pld"),
        (3, 1, 1000, "pld"),
        (2, 0.1, 1, "pld"),
        (3, 0.01, 1000, "rdp"),
        (0.01, 0.04, 1500, "rdp"),
        (100, 1, 1, "rdp"),
    ],
)
def test_calibrate_keeps_the_target_and_a_thousandth_less_noise_does_not(target, rate, steps, accountant):
    case = {"delta": 1e-5, "sampling_rate": rate, "steps": steps, "accountant": accountant}
    noise = calibrate(epsilon=target, **case)
    assert epsilon(noise_multiplier=noise, **case) <= target < epsilon(noise_multiplier=noise * 0.999, **case)
    assert float(f"{noise:.6g}") == noise


def test_the_noise_for_a_hundred_thousand_steps_is_right_by_dp_accounting_called_directly():
    case = {"delta": 1e-5, "sampling_rate": 0.01, "steps": 100_000}
    started = time.process_time()
    noise = calibrate(epsilon=4, **case)
    assert time.process_time() - started < 5  # 0.4 s of CPU time on an idle machine
    assert 4 * 0.998 < directly(pld.PLDAccountant(), noise_multiplier=noise, **case) <= 4


def test_a_target_that_no_noise_reaches_is_an_error_that_says_so():
    with pytest.raises(InputError, match=r"epsilon=1e-06 cannot be reached: .* write a larger epsilon"):
        calibrate(epsilon=1e-6, delta=1e-10, sampling_rate=1, steps=1000)


# --- importing ------------------------------------------------------------------------------------------------------


def python(code):
    source = str(Path(clipwise.types.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_accounting_loads_neither_torch_nor_dp_accounting():
    loaded = python("import sys, clipwise.accounting; print(*sys.modules)").split()
    assert "clipwise.accounting.ledger" in loaded
    assert not {"torch", "dp_accounting", "scipy", "numpy"} & set(loaded)


def test_calibrating_takes_seconds_and_no_torch():
    started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code = (
        f"import sys; from clipwise.accounting import *; print(calibrate(epsilon=4, **{CIFAR}), 'torch' in sys.modules)"
    )
    noise, torch = python(code).split()
    assert float(noise) == pytest.approx(1.848, abs=0.005)
    assert torch == "False"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started < 30  # 2 s on an idle machine


# --- ledger ---------------------------------------------------------------------------------------------------------

A, B = PoissonGaussian(2.0, 0.1), PoissonGaussian(3.5, 1.0)


def written(path, *events):
    with Ledger(path) as ledger:
        for event in events:
            ledger.record(event)
    return path.read_bytes()


def test_an_empty_ledger_costs_nothing():
    ledger = Ledger()
    assert (ledger.releases, ledger.entries, ledger.epsilon(1e-5)) == (0, [], 0.0)


def test_a_ledger_counts_equal_neighbours_together_and_keeps_the_order():
    ledger = Ledger()
    for event in (A, A, B, A):
        ledger.record(event)
    assert ledger.entries == [(A, 2), (B, 1), (A, 1)]
    assert ledger.releases == 4


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_ledger_of_equal_releases_costs_what_epsilon_says(accountant):
    ledger = Ledger()
    for _ in range(20):
        ledger.record(A)
    expected = epsilon(noise_multiplier=2.0, delta=1e-5, sampling_rate=0.1, steps=20, accountant=accountant)
    assert ledger.epsilon(1e-5, accountant) == expected


def test_different_releases_compose_as_dp_accounting_composes_them_in_any_order():
    accountant = pld.PLDAccountant()
    accountant.compose(as_dp_event(A), 3).compose(as_dp_event(B), 2)
    costs = []
    for order in [(A, B, A, B, A), (A, A, A, B, B)]:
        ledger = Ledger()
        for event in order:
            ledger.record(event)
        costs.append(ledger.epsilon(1e-5))
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
    assert costs[0] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert costs[0] > max(spent([(A, 3)], 1e-5), spent([(B, 2)], 1e-5))


BLOCK = [BlockGaussian(2.0, 0.5, begins) for begins in (True, False, False)]
EVERY = [A, Gaussian(9.5, "moyenne des traits é"), MemoryGaussian(2.0, 0.1, 0.25), *BLOCK[:2]]


def test_every_kind_of_release_has_a_line_that_reads_back(tmp_path):
    assert {type(event) for event in EVERY} == set(KINDS.values()) == set(Event.__args__)
    written(tmp_path / "ledger.jsonl", *EVERY)
    assert [event for event, _ in Ledger(tmp_path / "ledger.jsonl").entries] == EVERY


def test_totals_are_added_up_whatever_the_order():
    ledger = Ledger()
    for event in BLOCK * 3:
        ledger.record(event)
    assert len(ledger.entries) == 6
    assert [(event.begins, count) for event, count in totals(ledger.entries).items()] == [(True, 3), (False, 6)]


def test_whole_numbers_and_floats_are_one_event():
    ledger = Ledger()
    for event in (PoissonGaussian(2, 1), PoissonGaussian(2.0, 1.0)):
        ledger.record(event)
    assert ledger.entries == [(PoissonGaussian(2.0, 1.0), 2)]


def test_a_torn_line_of_a_block_counts_as_one_that_begins_unless_it_says_otherwise(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for before, after in itertools.product(BLOCK[:2], BLOCK[:2]):
        path.unlink(missing_ok=True)
        whole = written(path, before, after)
        last = len(whole.splitlines(keepends=True)[-1])
        for missing in range(last):
            torn = whole[: len(whole) - missing]
            path.write_bytes(torn)
            says_no = b": f" in torn.splitlines()[-1] and missing < last - 1
            with Ledger(path) as ledger:
                assert [event for event, count in ledger.entries for _ in range(count)][1:] == [BLOCK[int(says_no)]]
                ledger.record(A)
            assert Ledger(path).releases == 3  # the torn line was made whole


def test_a_line_is_on_file_before_record_returns(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    assert not path.exists()
    for number, sync in enumerate([False, True, False], start=1):
        ledger.record(A, sync=sync)
        assert path.read_bytes().count(b"\n") == number
        assert Ledger(path).entries == [(A, number)]
    ledger.close()


def test_a_reopened_ledger_continues(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path, A, PoissonGaussian(1 / 3, 0.1 + 0.2))
    before = path.read_bytes()
    assert written(path, A).startswith(before)
    assert Ledger(path).entries == [(A, 1), (PoissonGaussian(1 / 3, 0.1 + 0.2), 1), (A, 1)]


def test_closing_twice_is_fine_and_recording_after_it_continues(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    ledger.record(A)
    ledger.close()
    ledger.close()
    ledger.record(A)
    assert Ledger(tmp_path / "ledger.jsonl").releases == ledger.releases == 2
    ledger.close()


def test_a_torn_last_line_counts_as_the_line_before_it_wherever_it_was_cut(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, B, A, A)
    last = len(whole.splitlines(keepends=True)[-1])
    for missing in range(last):
        path.write_bytes(whole[: len(whole) - missing])
        assert Ledger(path).entries == [(B, 1), (A, 2)], missing
        assert path.read_bytes() == whole[: len(whole) - missing]  # reading changes nothing
    path.write_bytes(whole[:-9])
    written(path, B)
    assert Ledger(path).entries == [(B, 1), (A, 2), (B, 1)]  # the torn line was made whole, not glued to the next


def test_a_torn_line_that_cannot_be_the_one_before_it_is_an_error(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, A, B)
    second = whole.index(b"3.5")
    for content in [whole[: second + 1], whole[:5], whole[: whole.index(b"\n") + 1] + b"\0\0\0"]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"line [12] of ledger .* was cut off .* complete it by hand"):
            Ledger(path)


def test_a_last_line_that_lacks_only_its_newline_counts_as_what_it_says(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for lines in [(A,), (A, B)]:
        path.unlink(missing_ok=True)
        path.write_bytes(written(path, *lines)[:-1])
        assert Ledger(path).entries == [(event, 1) for event in lines]
        written(path, A)
        assert Ledger(path).releases == len(lines) + 1


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"release",
        b"[1]",
        b'{"event": "poisson_gaussian"}',
        b"\xff",
        b'{"noise_multiplier": 1}',
        b"null",
        b'{"event": "poisson_gaussian", "sampling_rate": 0.1, "noise_multiplier": 1' + 400 * b"0" + b"}",
    ],
)
def test_a_damaged_line_inside_a_ledger_is_an_error_that_says_where(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, A)
    path.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(InputError, match=r"^line 2 of ledger [^\n]* is not a release [^\n]*$"):
        Ledger(path)


def test_a_release_of_unknown_kind_on_file_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "shuffled", "noise_multiplier": 1.0, "sampling_rate": 0.1}\n')
    with pytest.raises(Refused, match="unknown kind 'shuffled'"):
        Ledger(path)


def test_a_refused_event_leaves_no_line(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(Refused):
        ledger.record(Shuffled(1.0, 0.1))
    assert ledger.releases == 0
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_full_disk_is_an_error_that_counts_nothing_and_leaves_no_part_of_a_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    line = len(written(path, A))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(path) as ledger:
        for room in (0, 10):  # no byte of the next line fits; a part of it does
            resource.setrlimit(resource.RLIMIT_FSIZE, (line + room, hard))
            try:
                with pytest.raises(InputError, match=r"^cannot write the ledger [^\n]*$"):
                    ledger.record(A)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert ledger.releases == 1
            assert path.stat().st_size == line
        ledger.record(A)
    assert Ledger(path).releases == ledger.releases == 2


def test_a_ledger_in_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(InputError, match="cannot write the ledger"):
        Ledger(tmp_path / "nowhere" / "ledger.jsonl").record(A)
    with pytest.raises(InputError, match="cannot read the ledger"):
        Ledger(tmp_path)


def test_a_process_that_is_killed_leaves_every_release_that_it_had_recorded(tmp_path):
    path = tmp_path / "ledger.jsonl"
    code = (
        "from clipwise.accounting import Ledger; from clipwise.types import PoissonGaussian\n"
        f"ledger = Ledger({str(path)!r})\n"
        "while True: ledger.record(PoissonGaussian(2.0, 0.1)); print('recorded', flush=True)"
    )
    source = str(Path(clipwise.types.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        used = sum(1 for _ in itertools.islice(run.stdout, 200))
        run.kill()
        used += sum(line == "recorded\n" for line in run.stdout)
    assert run.returncode == -9 and used >= 200
    with Ledger(path) as ledger:
        assert used <= ledger.releases <= used + 1  # one may have been on file and not yet used
        ledger.record(A)
    assert Ledger(path).releases == ledger.releases


def test_two_writers_of_one_ledger_are_found_out(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as first, Ledger(path) as second:
        first.record(A)
        with pytest.raises(InputError, match="something else writes to it"):
            second.record(A)
        assert (first.releases, second.releases) == (1, 0)


# --- choosing among runs ---------------------------------------------------------------------------------------------

RUN = [(PoissonGaussian(2.0, 0.05), 100)]


@pytest.mark.parametrize(("draw", "shape"), [("poisson", math.inf), ("geometric", 1.0), ("logarithmic", 0.0)])
def test_the_price_of_choosing_the_best_of_a_random_number_of_runs_is_dp_accounting_s(draw, shape):
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0))
    repeated = dp_event.RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(event, 100), 8.0, shape)
    direct = rdp.RdpAccountant().compose(repeated).get_epsilon(1e-5)
    assert selection(RUN, 1e-5, runs=8, draw=draw) == pytest.approx(direct, rel=1e-9)


def test_choosing_costs_more_than_one_run_and_less_than_publishing_all_of_many():
    one, some, many = spent(RUN, 1e-5), selection(RUN, 1e-5, runs=8), selection(RUN, 1e-5, runs=64)
    assert one < some < many < spent(RUN * 64, 1e-5)
    assert selection([], 1e-5, runs=8) == 0.0
    assert selection([(MemoryGaussian(6.0, 0.05, 0.1), 100)], 1e-5, runs=8) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"runs": 0.5}, "runs must be a number of at least 1"), ({"draw": "posson"}, "did you mean 'poisson'")],
)
def test_a_bad_number_of_runs_is_an_error(change, message):
    with pytest.raises(InputError, match=message):
        selection(RUN, 1e-5, **{"runs": 8, **change})


def test_a_ledger_extended_by_another_holds_what_recording_one_by_one_leaves(tmp_path):
    one, other = Ledger(tmp_path / "one"), Ledger(tmp_path / "other")
    for event in (A, A, B, A):
        one.record(event)
    other.extend([(A, 2), (B, 0), (B, 1), (A, 1)])
    assert other.entries == one.entries and other.releases == 4
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    other.extend([(A, 10**5)])  # at once: a long run's are not written line by line
    assert Ledger(tmp_path / "other").releases == 4 + 10**5


# --- the statement ---------------------------------------------------------------------------------------------------

KNOWN = {
    "delta": 1e-5,
    "accountant": "pld",
    "sampling_rate": 0.1,
    "expected_batch": 10.0,
    "noise_multiplier": 2.0,
    "generator": "AES-256-CTR",
    "method": "flat(clip_norm=1.0)",
    "self_tested": True,
    "fallbacks": (),
}


def stated(*events, earlier=(), **changed):
    from clipwise.report import Statement

    ledger = Ledger()
    ledger.extend(earlier)
    for event in events:
        ledger.record(event)
    return ledger, Statement.of(ledger, earlier=earlier, **{**KNOWN, **changed})


def test_a_statement_says_under_which_conditions_its_epsilon_holds():
    ledger, statement = stated(A, A)
    values = json.loads(json.dumps(statement.as_dict()))
    assert values["epsilon"] == ledger.epsilon(1e-5)
    kind = {"event": "poisson_gaussian", "noise_multiplier": 2.0, "sampling_rate": 0.1, "count": 2}
    assert values["entries"] == [kind] and values["releases"] == 2
    assert (values["relation"], values["discretisation"]) == ("add or remove one sample", 1e-4)
    expected = {"relation", "sampling", "delta", "accountant", "discretisation", "generator", "refused", "excluded"}
    assert expected <= {name for name, value in values.items() if value}
    named = {"python", "clipwise", "torch", "numpy", "scipy", "dp-accounting", "cryptography"}
    assert set(values["versions"]) == named and "not installed" not in values["versions"].values()
    assert "clipwise.accounting.selection" in statement.text()  # where a user who chose among runs looks
    assert max(map(len, statement.text().splitlines())) <= 80
    text = " ".join(statement.text().split())
    for part in ("add or remove one sample", "Poisson, rate 0.1", "grid 0.0001", "AES-256-CTR", *statement.excluded):
        assert part in text
    assert all(part in text for part in statement.refused)
    assert "rows of a person who stands in more than one" in text
    assert "expected batch 10 of 100 samples" in text and "it would allow" not in text
    _, loose = stated(A, delta=0.01)
    assert "plus a probability of 0.01 ← not below 1/samples: it would allow" in " ".join(loose.text().split())


def test_a_statement_says_in_words_what_its_epsilon_means_and_rounds_it_up():
    _, statement = stated(A)
    said = " ".join(statement.text().split())
    (spent, times) = re.search(
        r"meaning whatever .* at most e\^(\S+) = (\S+) times as likely .* plus .* of 1e-05", said
    ).groups()
    assert float(spent) >= statement.epsilon and float(times) >= math.exp(float(spent))
    assert float(times) == pytest.approx(math.exp(statement.epsilon), rel=0.01)
    _, much = stated(PoissonGaussian(0.1, 1.0))
    assert much.epsilon > 14 and " = " not in " ".join(much.text().split()).split("meaning")[1].split("accountant")[0]


def test_a_statement_before_the_first_release_names_the_usual_grid():
    _, statement = stated()
    assert statement.epsilon == 0 and "grid 0.0001, 0 steps" in statement.text()


def test_a_statement_names_what_was_spent_before_the_steps_and_counts_it():
    _, plain = stated(A)
    _, more = stated(A, A, earlier=[(Gaussian(5.0, "means of the scattering features"), 1)])
    assert more.epsilon > plain.epsilon
    assert plain.spent_before == () and "nothing: the steps are all" in plain.text() and "1 step\n" in plain.text()
    said = " ".join(more.text().split())
    assert "2 steps, and 1 release spent before" in said
    assert "1 × means of the scattering features, of all samples, multiplier 5" in said


@pytest.mark.parametrize("same", [True, False])
def test_a_reader_can_compute_epsilon_again_from_what_the_statement_names(same):
    """A run after another: its own steps, and those of the other, even where they cost the same."""
    before = A if same else PoissonGaussian(1.25, 0.2)
    ledger, statement = stated(A, A, A, earlier=[(before, 4)])
    values = json.loads(json.dumps(statement.as_dict()))
    assert (values["steps"], values["releases"]) == (3, 7)
    named = [(each.pop("count"), each) for each in (*values["entries"], *values["spent_before"])]
    assert all(each.pop("event") == "poisson_gaussian" for _, each in named)
    assert spent([(PoissonGaussian(**each), count) for count, each in named], 1e-5) == ledger.epsilon(1e-5)
    said = " ".join(statement.text().split())
    assert "3 steps, and 4 releases spent before" in said and "rate 0.1, expected batch 10" in said
    assert f"4 × Poisson, rate {before.sampling_rate}, multiplier {before.noise_multiplier:g}" in said


def test_steps_that_are_no_plain_poisson_draws_are_said_with_all_that_they_cost():
    _, full = stated(MemoryGaussian(2.0, 0.1, 0.25))
    assert "1 × Poisson, rate 0.1, with hidden memory 0.25, multiplier 2" in " ".join(full.text().split())
    _, blocks = stated(BlockGaussian(2.0, 0.3, True), BlockGaussian(2.0, 0.3, False), BlockGaussian(2.0, 0.3, False))
    assert "1 × a block begun, rate 0.3, multiplier 2; 2 × within a block" in " ".join(blocks.text().split())


def test_how_an_earlier_run_sampled_is_not_said_of_this_one():
    _, statement = stated(A, earlier=[(BlockGaussian(2.0, 0.3, True), 1)])
    assert statement.sampling == "Poisson"


def test_only_an_accountant_with_a_grid_states_one():
    _, statement = stated(A, accountant="rdp")
    assert statement.discretisation is None and "grid" not in statement.text()


def test_a_run_that_goes_on_with_the_ledger_of_its_statistics_states_both():
    import torch

    import clipwise as cw

    ledger, model = Ledger(), torch.nn.Linear(3, 2)
    ledger.record(Gaussian(5.0, "means of the columns"))
    data = (torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    setting = {"noise_multiplier": 2.0, "delta": 1e-3, "steps": 3, "batch": 10, "noise": 1}
    private = cw.make_private(model, torch.optim.SGD(model.parameters()), data, ledger=ledger, **setting)
    for batch in private.batches():
        private.step(batch)
    both = [(Gaussian(5.0, "means of the columns"), 1), (PoissonGaussian(2.0, 0.25), 3)]
    assert private.epsilon() == spent(both, 1e-3) > spent(both[1:], 1e-3)
    assert [each["what"] for each in private.statement().spent_before] == ["means of the columns"]


def test_a_statement_says_how_a_run_with_groups_or_with_memory_samples():
    grouped = stated(*BLOCK)[1]
    assert "one group per step" in grouped.text() and "rate 0.1 over all samples" in grouped.text()
    assert [entry["sampling_rate"] for entry in grouped.entries] == [0.5, 0.5]  # at which a group is drawn
    assert "hidden memory" in stated(MemoryGaussian(2.0, 0.1, 0.25))[1].text()
