"""Audits of the code as it runs: canaries do the worst that a method allows, and no bound exceeds its claim.

Receives: every registered method, through Private.step; simulated noise, draws and scores with known faults.
Gives: what canaries move, what the audits show, what the checks find, and membership inference against slow loops.
"""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise import report
from clipwise.audit import CANARIES, AuditPlan, Verdict, audit, coins, mia, one_run, registered, watched, white_box
from clipwise.audit.canaries import LAYERS, active, flooding, saturating, worlds
from clipwise.audit.mechanics import mechanics, noise_checks, sampling_checks
from clipwise.audit.verdict import HARSHER
from clipwise.cli import audit as command
from clipwise.cli import main
from clipwise.config import AuditConfig
from clipwise.methods import METHODS, Method, parse
from clipwise.models import Accompanied
from clipwise.records import from_dense
from clipwise.report.answer import in_numbers as rows_of
from clipwise.report.folder import digest
from clipwise.step import private_sum
from clipwise.types import InputError

# One full-batch step: its claims have a closed form, so that no accountant's time is spent.
SMALL = AuditPlan(sampling_rate=1.0, steps=1, trials=3840, canaries=100, runs=24, run_steps=3, noise=1)
REGISTERED = [text for name in METHODS for text in HARSHER.get(name, (name,))]
COMBINED = (
    "layerwise({'a.b': flat(1.0), 'a.c': global_(2.0), '': psac()})",
    "layerwise(psac(), noise='proportional')",
    "bam(global_(2.0))",
    "inner_momentum(self_augmentation(adaptive(), views=2))",
    "p_average(layerwise(global_(3.0)))",
    "batch_clipping(psac(), companions=1)",
)


def test_the_table_of_canaries_has_a_line_for_every_method() -> None:
    assert set(CANARIES) == set(METHODS)


@pytest.mark.parametrize("text", [*REGISTERED, *COMBINED])
def test_every_canary_moves_the_release_by_all_that_is_accounted_for_and_no_more(text: str) -> None:
    for world in worlds(parse(text), 8):
        if world.name.startswith(flooding.__name__):
            continue
        seen = white_box.observe(world, noise_multiplier=1e-6, steps=24, noise=1)
        present, absent = seen.scores[seen.drawn], seen.scores[:, : world.canaries][~seen.drawn[:, : world.canaries]]
        without = absent if len(absent) else np.zeros(1)
        assert present.std() < 1e-3 and without.std() < 1e-3, world.name  # whoever else was drawn
        share = 1 - (world.method.count.share if world.method.count and not world.counts else 0.0)
        assert present.mean() - without.mean() == pytest.approx(share, abs=2e-3), world.name
        assert present.max() - without.min() <= 1 + 1e-4, world.name


@pytest.mark.parametrize("text", REGISTERED)
def test_no_audit_of_a_registered_method_shows_more_than_is_claimed(text: str) -> None:
    rows = audit([parse(text)], SMALL)
    assert [row for row in rows if not row.passed] == []
    shown = {row.audit.partition(",")[0]: row for row in rows if row.shown is not None and row.ceiling is not None}
    method = parse(text)
    assert "one run" in shown and ("step" in shown or method.feedback is not None)
    assert ("whole runs" in shown) is (method.feedback is not None or method.recall is not None)
    for row in shown.values():
        assert row.shown is not None and row.ceiling is not None and row.shown <= row.ceiling
    if method.name not in ("p_average", "dice"):  # whose lone canaries are looked at too seldom here
        assert max(row.shown or 0 for row in rows) > 1.5  # of 4.4: they are really seen


def test_global_clipping_keeps_what_is_just_below_its_threshold_and_nothing_of_what_is_just_above() -> None:
    like = {"w": torch.zeros(3)}
    kept = {}
    for length in (2.0 * (1 - 1e-6), 2.0 * (1 + 1e-6), 2e6):
        row = torch.zeros(1, 3, dtype=torch.float64)
        row[0, 1] = length
        private, _ = private_sum(parse("global_(2.0)"), like, [from_dense({"w": row}, like)])
        kept[length] = float(private.parts[0].value["w"].norm())
    assert list(kept.values()) == [pytest.approx(2.0, rel=1e-4), 0.0, 0.0]


def test_what_batch_clipping_makes_of_a_sample_has_no_derivative_by_another_private_sample() -> None:
    torch.manual_seed(0)
    public = torch.randn(6, 3)
    model = Accompanied(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), public, 2)
    x, y = torch.randn(5, 3), torch.arange(5) % 2
    found = []
    for change in (0.0, 1.0):
        private = cw.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (x + change * nn.functional.one_hot(torch.tensor(2), 5)[:, None], y),
            method="batch_clipping(flat(1.0), companions=2)",
            noise_multiplier=1.0,
            steps=1,
            batch=5,
            public=public,
            noise=1,
        )
        gradients = private.method.gradients(private.engine(torch.arange(5), 7), private.rows(torch.arange(5)))
        found.append(torch.cat([g.flatten(1) for g in gradients.materialise().values()], 1))
    others = torch.arange(5) != 2
    assert torch.allclose(found[0][others], found[1][others], rtol=0, atol=1e-6)
    assert not torch.allclose(found[0][~others], found[1][~others], rtol=0, atol=1e-2)


def test_scores_of_absent_canaries_have_the_noise_that_is_claimed() -> None:
    for text in ("flat(3.0)", "layerwise(flat(2.0), noise='proportional')", "adaptive(count_share=0.3)"):
        method = parse(text)
        seen = white_box.observe(saturating(method, 32), noise_multiplier=1.7, steps=150, noise=2)
        share = 1 - (method.count.share if method.count else 0.0)  # what is looked at here of the likelihood ratio
        scores = seen.scores[:, ~seen.member]
        assert scores.std() == pytest.approx(1.7 * math.sqrt(share), rel=4 / math.sqrt(2 * scores.size))


def test_an_adaptive_methods_count_is_read_back_from_the_clip_norm_that_it_moved() -> None:
    (world,) = [w for w in worlds(parse("adaptive(count_share=0.5)"), 1) if w.counts]
    seen = white_box.observe(world, noise_multiplier=1.0, steps=800, noise=3)
    present, absent = seen.scores[:, 0][seen.drawn[:, 0]], seen.scores[:, 0][~seen.drawn[:, 0]]
    error = math.sqrt(1 / len(present) + 1 / len(absent))
    assert present.mean() - absent.mean() == pytest.approx(1.0, abs=4 * error)  # half of it is the count's
    assert absent.std() == pytest.approx(1.0, rel=4 / math.sqrt(2 * len(absent)))


def test_phases_of_a_schedule_are_audited_one_by_one() -> None:
    found = worlds(parse("schedule([(0, flat(1.0)), (9, bam(global_(2.0)))])"), 4)
    assert [world.name for world in found] == ["saturating, phase 1", "saturating, phase 2", "curved, phase 2"]
    assert [[m.name for m in active(world.method)][1] for world in found] == ["flat", "bam", "bam"]
    wrapped = worlds(parse("inner_momentum(schedule([(0, flat(1.0)), (9, bam(global_(2.0)))]))"), 4)
    assert [world.name for world in wrapped] == [world.name for world in found]


def test_phases_that_name_blocks_or_take_public_inputs_are_audited_each_in_a_model_for_all() -> None:
    method = parse("schedule([(0, flat()), (2, layerwise({'a': flat(), '': flat()})), (4, batch_clipping())])")
    found = worlds(method, 4)
    assert [world.layers for world in found] == [("a", "rest"), ("a", "rest"), LAYERS]
    for world in found:
        seen = white_box.observe(world, noise_multiplier=1e-6, steps=8, noise=1)
        assert seen.scores[seen.drawn] == pytest.approx(1.0, abs=1e-3)
    mechanics(method, noise_multiplier=1.0, steps=20, confidence=0.99, noise=1)


def test_coins_are_fair_and_a_seed_repeats_them() -> None:
    assert torch.equal(coins(50, 3), coins(50, 3)) and not torch.equal(coins(50, 3), coins(50, 4))
    assert abs(float(coins(10_000, "secure").double().mean()) - 0.5) < 0.03  # 6 deviations


def test_less_noise_shows_more() -> None:
    found = [
        one_run(
            parse("flat"),
            noise_multiplier=sigma,
            sampling_rate=1.0,
            steps=1,
            canaries=400,
            delta=1e-5,
            confidence=0.95,
            noise=1,
        )
        for sigma in (2.0, 0.5)
    ]
    (little, _), (much, claimed) = found
    assert little.value < 1 < 2 < much.value <= much.ceiling < claimed


def test_a_run_of_ones_own_is_audited_with_canaries_behind_its_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 30, generator=generator), torch.randint(0, 4, (60,), generator=generator)
    strange, label = torch.randn(50, 30, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    included = coins(50, 5)
    data = (torch.cat([x, strange[included]]), torch.cat([y, label[included]]))
    torch.manual_seed(0)
    for sigma, least in ((0.1, 0.97), (50.0, 0.0)):
        model = nn.Linear(30, 4)
        private = cw.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            method="layerwise",
            noise_multiplier=sigma,
            steps=3,
            batch=len(data[0]),
            noise=1,
        )
        scores = watched(private, (strange, label), known=60)
        assert private.steps_taken == 3
        found = mia.roc(scores[included.numpy()], scores[~included.numpy()])
        assert found.area >= least and (least or found.low < 0.6)


@pytest.mark.parametrize("memory", ["full", "none", "blocks", "bounded"])
def test_a_flooding_canary_turns_the_feedback_of_the_others_around(memory: str) -> None:
    """C2's part of a release goes from −c2 to +c2, which is all that the proofs allow; for how long is the memory's."""
    world, _ = worlds(parse(f"dice(flat(1.0), feedback_norm=1.0, memory='{memory}', blocks=4)"), 1)
    fed_back = []
    for own in (world, white_box._absent(world)):
        private = white_box.private_for(own, 1e-6, 16, 1)
        for batch in private.batches():
            canary, others = (batch.indices == 0).sum(), (batch.indices > 0).sum()
            private.step(batch)
            released = white_box.scores(own, private, private.method)[0]
            fed_back.append(float(released + others - (canary if own is world else 0)))
    with_canary, without = fed_back[:16], fed_back[16:]
    c2 = 1.0  # B · C2, and B = 1
    for value in fed_back:
        assert min(abs(value - c2), abs(value), abs(value + c2)) < 1e-3
    turned = [a - b for a, b in zip(with_canary, without, strict=True)]
    assert max(turned) == pytest.approx(2 * c2, abs=1e-3)
    if memory == "full":  # once drawn it stays there
        first = next(t for t, value in enumerate(turned) if value > 1.9)
        assert turned[first:] == pytest.approx([2 * c2] * (16 - first), abs=1e-3)


def test_whole_runs_show_the_memory_that_single_steps_do_not() -> None:
    """What is fed back of one draw is in every later release: accounted as plain DP-SGD, the claim is broken."""
    world, _ = worlds(parse("dice(flat(1.0), feedback_norm=40.0)"), 1)
    steps, sigma, delta = 4, 10.0, 1e-3
    bound, claimed = white_box.trajectories(
        world, noise_multiplier=sigma, steps=steps, runs=60, delta=delta, confidence=0.95, noise=1
    )
    plain = cw.epsilon(noise_multiplier=sigma, delta=delta, sampling_rate=world.rate, steps=steps)
    assert 2 * plain < bound.value <= claimed


# Noise and sampling


def faults(found: list[tuple[str, float, float, float]]) -> set[str]:
    return {name for name, _, _, deviations in found if abs(deviations) > 5}


def test_checks_of_the_noise_find_what_is_wrong_with_it() -> None:
    generator = np.random.default_rng(0)
    z, sizes = generator.normal(size=(200, 128)), generator.binomial(12, 1 / 6, size=200)
    assert faults(noise_checks(z, sizes)) == set()
    assert faults(noise_checks(0.95 * z, sizes)) >= {"noise of other batches"}
    assert faults(noise_checks(np.where(sizes[:, None] == 0, 0.5 * z, z), sizes)) >= {"noise of empty batches"}
    repeated = z.copy()
    repeated[150] = -z[7]
    assert faults(noise_checks(repeated, sizes)) == {"closest noise of two steps"}
    uniform = generator.uniform(-math.sqrt(3), math.sqrt(3), size=z.shape)
    assert "distance of the noise from a normal" in faults(noise_checks(uniform, sizes))


def test_checks_of_the_sampling_find_what_is_wrong_with_it() -> None:
    generator = np.random.default_rng(0)
    rates = np.full((300, 12), 0.25)
    drawn = generator.uniform(size=rates.shape) < rates
    assert faults(sampling_checks(drawn, rates)) == set()
    assert faults(sampling_checks(generator.uniform(size=rates.shape) < 0.35, rates)) >= {"samples drawn"}
    orders = [generator.permutation(12).reshape(4, 3) for _ in range(75)]
    shuffled = np.array([np.isin(np.arange(12), batch) for order in orders for batch in order])
    assert faults(sampling_checks(shuffled, rates)) == {"variance of the batch's size", "drawn twice in a row"}
    assert "drawn twice in a row" in faults(sampling_checks(np.repeat(drawn[:150], 2, axis=0), rates))
    everybody = np.ones((5, 12), dtype=bool)
    assert faults(sampling_checks(everybody, np.ones((5, 12)))) == set()
    assert faults(sampling_checks(everybody & (np.arange(12) > 0), np.ones((5, 12)))) != set()


def test_secure_noise_and_its_draws_pass_their_checks() -> None:
    # drawn afresh in each run: about once in a hundred million runs one of them fails
    checks = mechanics(parse("layerwise"), noise_multiplier=0.7, steps=150, confidence=1 - 1e-9, noise="secure")
    assert [str(check) for check in checks if not check.passed] == [] and len(checks) == 7


@pytest.mark.parametrize("text", ["adaptive(count_share=0.5)", "p_average(adaptive(count_share=0.5), size=2)"])
def test_the_noise_of_a_count_is_checked_also_where_it_counts_units(text: str) -> None:
    checks = mechanics(parse(text), noise_multiplier=0.7, steps=150, confidence=0.9999, noise=3)
    assert [str(check) for check in checks if not check.passed] == []
    (count,) = [check for check in checks if check.name == "noise of the count"]
    assert count.measured == pytest.approx(1.0, abs=0.25)


# Membership inference


def test_the_curve_and_its_area_are_those_of_counting_pairs() -> None:
    generator = np.random.default_rng(0)
    members, others = generator.integers(0, 9, 40) + 1.0, generator.integers(0, 9, 30).astype(float)
    found = mia.roc(members, others)
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in members for b in others]
    assert found.area == pytest.approx(sum(pairs) / len(pairs))
    for fpr, tpr in zip(found.fpr, found.tpr, strict=True):
        points = [((others >= t).mean(), (members >= t).mean()) for t in [*np.arange(11.0), np.inf]]
        assert any(fpr == pytest.approx(a) and tpr == pytest.approx(b) for a, b in points)
    best = max((members >= t).mean() for t in [*np.arange(11.0), np.inf] if (others >= t).mean() == 0)
    assert found.tpr_at(0.0) == pytest.approx(best)


def test_the_areas_interval_holds_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    truth = 0.5 * (1 + math.erf(1.0 / 2))  # P[N(1, 1) > N(0, 1)] = Φ(1/√2)
    inside = 0
    for _ in range(300):
        found = mia.roc(generator.normal(size=60) + 1, generator.normal(size=80), 0.9)
        inside += found.low <= truth <= found.high
    assert 0.84 <= inside / 300 <= 0.96


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="finite scores"):
        mia.roc(np.array([1.0, np.nan]), np.zeros(3))


def slow_likelihood_ratio(target: np.ndarray, shadows: np.ndarray, included: np.ndarray) -> list[float]:
    out = []
    kinds = []
    for wanted in (True, False):
        residuals, count, means = 0.0, 0, []
        for i in range(len(target)):
            own = [shadows[k, i] for k in range(len(shadows)) if bool(included[k, i]) is wanted]
            means.append(sum(own) / len(own))
            residuals += sum((value - means[-1]) ** 2 for value in own)
            count += len(own) - 1
        kinds.append((means, residuals / count))
    for i, value in enumerate(target):
        logs = [-((value - means[i]) ** 2) / (2 * var) - 0.5 * math.log(2 * math.pi * var) for means, var in kinds]
        out.append(logs[0] - logs[1])
    return out


def test_the_likelihood_ratio_is_that_of_two_normals_fitted_to_the_shadows() -> None:
    generator = np.random.default_rng(2)
    shadows, target = generator.normal(size=(6, 9)), generator.normal(size=9)
    included = np.array([generator.permutation([1, 1, 1, 0, 0, 0]) for _ in range(9)]).T.astype(bool)
    found = mia.likelihood_ratio(target, shadows, included)
    np.testing.assert_allclose(found, slow_likelihood_ratio(target, shadows, included), rtol=1e-9)
    with pytest.raises(InputError, match="in some shadow"):
        mia.likelihood_ratio(target, shadows, np.ones_like(included))


def memorised(rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A model that learns random labels by heart, in a closed form: ridge regression with as many features as rows."""
    targets = 6 * nn.functional.one_hot(y[rows], 3).double() - 2
    inputs = x[rows].double()
    weight = inputs.T @ torch.linalg.solve(inputs @ inputs.T + 1e-2 * torch.eye(len(rows)), targets)
    model = nn.Linear(x.shape[1], 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight.T)
    return model


def test_attacks_find_members_of_a_model_that_learned_by_heart_and_none_of_one_that_learned_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 200, generator=generator), torch.randint(0, 3, (240,), generator=generator)
    members, others = (x[:120], y[:120]), (x[120:], y[120:])
    torch.manual_seed(0)
    knowing, blank = memorised(torch.arange(120), x, y), nn.Linear(200, 3)
    found = mia.shadow_attack(knowing, lambda rows: memorised(rows, x, y), members, others, shadows=4)
    assert found.low > 0.9
    nothing = mia.shadow_attack(blank, lambda rows: blank, members, others, shadows=4)
    assert nothing.low <= 0.5 <= nothing.high
    assert mia.logistic_attack(knowing, members, others).low > 0.8
    with torch.device("meta"):  # as with torch.set_default_device("cuda"): the attack is on the processor
        guess = mia.logistic_attack(blank, members, others)
    assert guess.low <= 0.5 <= guess.high


def test_attacks_find_members_of_a_regression_that_learned_by_heart() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(160, 150, generator=generator), torch.randn(160, generator=generator)

    def fitted(rows: torch.Tensor) -> nn.Module:
        model = nn.Linear(150, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linalg.lstsq(x[rows], y[rows, None]).solution.T)
        return model

    members, others = (x[:80], y[:80]), (x[80:], y[80:])
    knowing = fitted(torch.arange(80))
    assert mia.logistic_attack(knowing, members, others).low > 0.7
    assert mia.shadow_attack(knowing, fitted, members, others, shadows=4).low > 0.7


def test_shadows_are_trained_on_halves_that_hold_every_row_equally_often() -> None:
    x, y = torch.zeros(11, 2), torch.zeros(11, dtype=torch.long)
    seen: list[torch.Tensor] = []

    def train(rows: torch.Tensor) -> nn.Module:
        seen.append(rows)
        torch.manual_seed(len(seen))
        return nn.Linear(2, 2)

    mia.shadow_attack(nn.Linear(2, 2), train, (x[:5], y[:5]), (x[5:], y[5:]), shadows=6)
    assert [len(rows) for rows in seen] == [5, 6] * 3
    assert torch.bincount(torch.cat(seen), minlength=11).tolist() == [3] * 11
    assert not torch.equal(seen[0], seen[2])


def test_a_curve_is_written_down_from_its_first_point_to_its_last() -> None:
    generator = np.random.default_rng(3)
    found = mia.roc(generator.normal(size=900) + 1, generator.normal(size=900))
    kept = found.as_dict()
    assert len(kept["fpr"]) == len(kept["tpr"]) <= mia.POINTS < len(found.fpr)
    assert (kept["fpr"][0], kept["tpr"][0], kept["fpr"][-1], kept["tpr"][-1]) == (0, 0, 1, 1)
    assert json.loads(json.dumps(kept)) == kept and kept["area"] == found.area


# The command

FEW = ["--trials", "1280", "--canaries", "40", "--runs", "8", "--noise-seed", "1", "--quiet"]
ONE_STEP = [*FEW, "--sampling-rate", "1", "--steps", "1"]


def test_the_command_prints_a_verdict_for_each_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--method", "flat", "global_(2.0)", *ONE_STEP]) == 0
    text = capsys.readouterr().out
    assert "all 8 claims hold" in text and text.count("one run") == 2
    for title in ("method", "audit", "claimed ε", "audited ≥", "could show", "verdict"):
        assert title in text.splitlines()[0]
    assert main(["audit", "--method", "flat", "--json", *ONE_STEP]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and {row["audit"] for row in found["rows"]} >= {"step", "one run", "noise and sampling"}


def test_an_attack_that_could_not_refute_the_claim_is_marked_and_the_mark_explained() -> None:
    rows = [
        Verdict("flat", "step", 7.0, 6.0, 500.0, True, ""),
        Verdict("flat", "one run", 7.0, 1.0, 2.0, True, ""),
        Verdict("flat", "ledger", 7.0, 6.9, 6.9, True, ""),
        Verdict("flat", "noise and sampling", None, None, None, True, ""),
    ]
    text = command._text(AuditPlan(), rows, {}, None)
    assert [line.split()[-1] for line in text.splitlines()[1:5]] == ["holds", "holds*", "holds", "holds"]
    assert "could show: the ε" in text and "holds*: too weak to refute" in text
    assert "holds*" not in command._text(AuditPlan(), rows[:1], {}, None)


def test_the_table_of_all_methods_fits_into_80_columns_and_cuts_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(method) for method in registered()]
    audits = ("ledger", "sampled step, phase 2", "sampled step, curved", "whole runs", "one run (retrained)")
    rows = [Verdict(name, audit, 91.8, 7.046, 2713.0, True, "") for name in names for audit in audits]
    text = command._text(AuditPlan(), rows, {}, None)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert [line.split()[0] for line in text.splitlines() if "ledger" in line] == [m.name for m in registered()]
    for memory in ("full", "none", "blocks", "bounded"):
        assert f"dice {memory} " in text
    weak = command._text(AuditPlan(), [replace(each, ceiling=2.0) for each in rows], {}, None)
    assert max(map(len, weak.splitlines())) <= 80 and "…" not in weak


def test_methods_of_one_name_are_told_apart_by_their_settings_or_by_a_number_that_is_explained() -> None:
    assert command._labels(["psac(clip_norm=1.0, r=0.1)", "flat(clip_norm=1.0)"]) == {
        "psac(clip_norm=1.0, r=0.1)": "psac",
        "flat(clip_norm=1.0)": "flat",
    }
    assert list(command._labels(["flat(0.5)", "flat(2.0)"]).values()) == ["flat 0.5", "flat 2.0"]
    long = ["bam(layerwise(flat(1.0)))", "bam(layerwise(global_(2.0)))"]
    assert list(command._labels(long).values()) == ["bam 1", "bam 2"]


def test_the_command_exits_with_1_where_a_bound_exceeds_the_claim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clipwise.audit.verdict._claimed", lambda *_: 0.5)
    assert main(["audit", "--method", "flat", *ONE_STEP]) == 1
    text = capsys.readouterr().out
    assert "FALSE" in text and "of 4 claims are false" in text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, with little privacy and few steps."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    privacy = ["--noise-multiplier", "0.8", "--steps", "4", "--batch", "1438", "--noise-seed", "1"]
    few = ["--folder", str(folder), "--quiet", "--diagnose-every", "0"]
    assert main(["train", "--data", "digits", "--model", "mlp", *few, *privacy]) == 0
    return folder


def test_a_runs_configuration_is_audited_by_training_it_anew(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(finished), "--shadows", "2", *FEW]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("ledger", "one run (retrained)", "inference, logistic: area", "inference, likelihood ratio: area"):
        assert words in text
    assert "cannot be audited after the fact" in text and "audit.json, where clipwise report finds it" in text


def test_a_model_that_was_written_on_a_gpu_is_audited_without_one(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = shutil.copytree(finished, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(torch.load(finished / "model.pt"), there / "model.pt")
    stated = json.loads((there / "statement.json").read_text()) | {"model": digest(there / "model.pt")}
    (there / "statement.json").write_text(json.dumps(stated))
    assert main(["audit", str(there), "--quiet", *FEW]) == 0


def test_a_runs_verdict_is_kept_where_the_report_reads_it(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(finished), "--json", *FEW]) == 0
    printed = json.loads(capsys.readouterr().out)
    (run,) = report.read([finished])
    assert run.audit == printed and printed["passed"]
    assert set(printed["membership"]) == {"logistic"} and len(printed["membership"]["logistic"]["fpr"]) > 10
    assert rows_of([run])[0].audit is True


def test_a_verdict_that_cannot_be_kept_is_a_warning_since_it_is_told_anyway(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="cannot write .*nowhere"):
        command._keep(tmp_path / "nowhere" / "audit.json", "{}")


def test_a_regressions_run_is_audited_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=generator.normal(size=(200, 5)), y=generator.normal(size=200))
    folder = str(tmp_path / "run")
    few = ["--noise-multiplier", "1.5", "--steps", "2", "--batch", "160", "--folder", folder, "--quiet"]
    assert main(["train", "--data", f"npz:{tmp_path / 'data.npz'}?task=regression", "--model", "mlp", *few]) == 0
    assert main(["audit", folder, "--shadows", "2", "--json", *FEW]) == 0
    assert set(json.loads(capsys.readouterr().out)["membership"]) == {"logistic", "likelihood ratio"}


@pytest.mark.parametrize(
    ("method", "model"),
    [("p_average(flat(1.0))", "mlp"), ("batch_clipping(flat(1.0))", "resnet20_bn"), ("dice(flat(1.0), 0.01)", "mlp")],
)
def test_runs_of_methods_with_units_companions_or_feedback_are_audited_too(
    method: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, draw = str(tmp_path / "run"), np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=draw.normal(size=(200, 1, 2, 2)), y=np.arange(200) % 3)
    few = ["--noise-multiplier", "3", "--steps", "1", "--batch", "160", "--folder", folder, "--quiet", "--public", "5"]
    data = f"npz:{tmp_path / 'data.npz'}"
    assert main(["train", "--data", data, "--model", model, "--method", method, *few]) == 0
    assert main(["audit", folder, *FEW]) == 0
    assert "one run (retrained)" in capsys.readouterr().out


def test_what_was_spent_before_a_run_is_in_its_ledger_but_not_among_the_steps_that_are_made_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    few = ["--noise-multiplier", "2", "--steps", "2", "--batch", "1438", "--folder", folder, "--quiet"]
    assert main(["train", "--data", "digits", "--model", "mlp", "--spent", str(finished), *few]) == 0
    assert main(["audit", folder, "--json", *FEW]) == 0
    found = json.loads(capsys.readouterr().out)
    by_audit = {row["audit"]: row for row in found["rows"]}
    assert found["plan"]["steps"] == 2 and "6 releases" in by_audit["ledger"]["detail"]
    assert by_audit["one run (retrained)"]["claimed"] < by_audit["ledger"]["claimed"] / 2


def test_a_run_is_audited_with_its_statements_steps_also_where_its_last_measurement_was_lost(
    finished: Path, tmp_path: Path
) -> None:
    there = shutil.copytree(finished, tmp_path / "run")
    measured = (there / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert len(measured) == 4
    (there / "metrics.jsonl").write_text("".join(measured[:-1]))
    assert command._plan(AuditConfig(run=(str(there),)), command._read(there)).steps == 4
    (there / "metrics.jsonl").unlink()
    assert command._plan(AuditConfig(run=(str(there),)), command._read(there)).steps == 4


def test_a_statement_below_what_its_ledger_holds_is_false(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    statement = folder / "statement.json"
    stated = json.loads(statement.read_text())
    statement.write_text(json.dumps({**stated, "epsilon": stated["epsilon"] / 2}))
    assert main(["audit", str(folder), "--json", *FEW]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and not next(row for row in found["rows"] if row["audit"] == "ledger")["passed"]
    assert json.loads((folder / "audit.json").read_text())["passed"] is False
    with pytest.raises(ValueError, match="and its statement says"):
        report.read([folder])
    shutil.copy(finished / "statement.json", statement)
    (run,) = report.read([folder])
    assert run.audit is not None and run.audit["passed"] is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "5"], "has its own steps"),
        (["--method", "flat"], "got both"),
        (["--shadows", "3"], "come in pairs"),
    ],
)
def test_what_a_run_does_not_take_is_one_line(
    finished: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(finished), *given]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_shadows_without_a_run_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--method", "flat", "--shadows", "4"]) == 2
    assert "write clipwise audit RUN --shadows 8" in capsys.readouterr().err


def test_a_folder_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "nothing")]) == 2
    assert "there is no finished run" in capsys.readouterr().err


def test_what_the_statement_for_people_says_is_held_against_the_ledger_too(finished: Path, tmp_path: Path) -> None:
    there = shutil.copytree(finished, tmp_path / "run")
    ledger = command._ledger(command._read(there))
    assert ledger.passed and "4 releases, added up again" in ledger.detail
    text = there / "statement.txt"
    text.write_text(text.read_text().replace("(", "(0.", 1))
    assert (
        not (found := command._ledger(command._read(there))).passed and "statement.txt does not say (" in found.detail
    )
    shutil.copy(finished / "statement.txt", text)
    stated = json.loads((there / "statement.json").read_text())
    stated["entries"][0]["noise_multiplier"] *= 2
    (there / "statement.json").write_text(json.dumps(stated))
    assert not (found := command._ledger(command._read(there))).passed and "of other kinds" in found.detail
    (there / "ledger.jsonl").write_text("".join((there / "ledger.jsonl").read_text().splitlines(keepends=True)[:3]))
    assert "the ledger holds 3 releases, and statement.json says 4" in command._ledger(command._read(there)).detail


def test_a_model_that_is_not_the_statement_s_is_found(finished: Path, tmp_path: Path) -> None:
    there = shutil.copytree(finished, tmp_path / "run")
    (there / "model.pt").write_bytes((there / "model.pt").read_bytes() + b" ")
    found = command._ledger(command._read(there))
    assert not found.passed and "model.pt is another file" in found.detail


def test_a_run_without_its_data_is_audited_as_far_as_its_folder_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(200, 5)), y=np.arange(200) % 2)
    folder = str(tmp_path / "run")
    few = ["--noise-multiplier", "3", "--steps", "1", "--batch", "160", "--folder", folder, "--quiet"]
    assert main(["train", "--data", f"npz:{tmp_path / 'data.npz'}", "--model", "mlp", *few]) == 0
    (tmp_path / "data.npz").unlink()
    capsys.readouterr()
    assert main(["audit", folder, *FEW]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "flat ledger" in text and "sampled step" in text and "(retrained)" not in text
    assert "not trained anew: no file 'data.npz'" in text
    assert main(["audit", folder, "--shadows", "2", *FEW]) == 2
    assert "which cannot be done: no file 'data.npz'" in capsys.readouterr().err


@pytest.mark.parametrize("method", [cw.flat(), replace(cw.flat(), name="mine")])
def test_a_run_made_in_python_is_audited_as_far_as_its_folder_goes(
    method: Method, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = torch.randn(20, 3), torch.arange(20) % 2
    plan = {"noise_multiplier": 3.0, "steps": 1, "batch": 16, "delta": 1e-3, "method": method}
    cw.train(torch.nn.Linear(3, 2), cw.cross_entropy, data, folder=tmp_path / "run", **plan)
    assert main(["audit", str(tmp_path / "run"), "--json", *FEW]) == 0
    found = json.loads(capsys.readouterr().out)
    audits = [row["audit"] for row in found["rows"]]
    assert audits[0] == "ledger" and (len(audits) == 1) == (method.name == "mine")
    assert ("not clipwise's own" if method.name == "mine" else "clipwise.audit.watched") in found["note"]
    if method.name == "mine":
        assert main(["audit", str(tmp_path / "run"), *FEW]) == 0
        text = capsys.readouterr().out
        assert "mine" in text and text.endswith("the ledger agrees with the statement; nothing was attacked\n")
        assert "claims hold" not in text


def test_a_plan_refuses_what_no_audit_can_be_made_of() -> None:
    for name, value in {"trials": 10, "canaries": 3, "runs": 0, "confidence": 1.0, "noise_multiplier": 0.0}.items():
        with pytest.raises(InputError, match=name):
            replace(SMALL, **{name: value})
