"""Whole private runs: optimizers, schedules, averages, budgets, refusals, interruption and what is left behind.

Receives: make_private and train, on a few dozen samples, with a seeded stream where two runs are compared.
Gives: the number of releases that was planned, ε within the target, and folders that can always be resumed.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import clipwise as cw
from clipwise.diagnostics import Monitor
from clipwise.plain import rounded_up
from clipwise.report import RunFolder
from clipwise.types import InputError, PoissonGaussian, Refused
from made import Made

ROWS = 40
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 4, generator=GENERATOR)
Y = torch.randint(0, 3, (ROWS,), generator=GENERATOR)
# RDP where the value of ε does not matter: it is ten times faster
PLAN: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "steps": 6,
    "batch": 10,
    "noise": 3,
    "delta": 1e-3,
    "accountant": "rdp",
}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def trained(model: nn.Module | None = None, data: Any = (X, Y), loss: Any = cw.cross_entropy, **changed: Any) -> cw.Run:
    return cw.train(
        mlp() if model is None else model, loss, data, **{"optimizer": sgd, "self_test": False, **PLAN, **changed}
    )


def made(model: nn.Module | None = None, data: Any = (X, Y), optimizer: Any = None, **changed: Any) -> cw.Private:
    model = mlp() if model is None else model
    given = {"self_test": False, **PLAN, **changed}
    return cw.make_private(model, optimizer or sgd(model.parameters()), data, **given)


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


# Optimizers, schedules, averages


@pytest.mark.parametrize(
    "optimizer",
    [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "ASGD",
        "Rprop",
        "Adafactor",
    ],
)
def test_any_optimizer_of_torch_gets_the_released_gradient_and_nothing_else(optimizer: str) -> None:
    kind = getattr(torch.optim, optimizer)
    model, twin = mlp(), mlp()
    private = made(model, optimizer=kind(model.parameters(), lr=0.05))
    own = kind(twin.parameters(), lr=0.05)
    gradients: list[list[Tensor]] = []
    private.optimizer.register_step_pre_hook(
        lambda o, *_: gradients.append([p.grad.clone() for g in o.param_groups for p in g["params"]])
    )
    for batch in private.batches():
        private.step(batch)
    for each in gradients:  # the same optimizer, fed by hand
        for p, gradient in zip(twin.parameters(), each, strict=True):
            p.grad = gradient
        own.step()
    assert len(gradients) == 6
    torch.testing.assert_close(theta(model), theta(twin))


@pytest.mark.parametrize(
    "plan",
    [
        lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=7),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_learning_rate_schedule_takes_one_step_per_release_also_when_resumed(
    plan: Callable[[Any], Any], tmp_path: Path
) -> None:
    rates: list[float] = []
    kept: list[Any] = []

    def remembering(optimizer: Any) -> Any:
        kept.append(optimizer)
        return plan(optimizer)

    def stop(private: Any, *_: Any) -> None:
        rates.append(kept[-1].param_groups[0]["lr"])
        if private.steps_taken == 4 and len(kept) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(scheduler=remembering, progress=stop, folder=tmp_path / "run")
    trained(scheduler=remembering, progress=stop, folder=tmp_path / "run", resume=True)
    by_hand = torch.optim.SGD(mlp().parameters(), lr=0.2, momentum=0.9)
    schedule, expected = plan(by_hand), []
    for _ in range(6):
        by_hand.step()
        schedule.step()
        expected.append(by_hand.param_groups[0]["lr"])
    assert rates == pytest.approx(expected)


def test_the_average_is_the_hand_computed_one_and_is_what_is_returned_and_evaluated() -> None:
    model = mlp()
    path: list[Tensor] = []
    evaluated: list[Tensor] = []
    run = trained(
        model,
        average=0.7,
        progress=lambda *_: path.append(theta(model)),
        evaluate=lambda m: evaluated.append(theta(m)) or {},
    )
    average = path[0]
    for point in path[1:]:
        average = 0.7 * average + 0.3 * point
    torch.testing.assert_close(theta(run.model), average, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(evaluated[-1], average, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(average, path[-1])


def test_evaluation_happens_every_so_many_steps_and_at_the_end_in_eval_mode() -> None:
    modes = []
    model = mlp().train()
    run = trained(model, evaluate=lambda m: modes.append(m.training) or {"accuracy": 0.5}, evaluate_every=4)
    assert [row["step"] for row in run.metrics] == [4, 6] and modes == [False] * 3  # and tried at first
    assert all(row["accuracy"] == 0.5 and row["epsilon"] > 0 for row in run.metrics)
    assert model.training


def test_a_notebook_shows_a_run_in_one_line(tmp_path: Path) -> None:
    run = trained(evaluate=lambda m: {"accuracy": 0.5}, folder=tmp_path / "run")
    shown = f"δ = {run.statement.delta:g}: step 6, epsilon {rounded_up(run.epsilon)}, accuracy 0.5>"
    assert repr(run) == f"<private run of {type(run.model).__name__} by {run.statement.method}, {shown}"
    assert repr(cw.Ledger(tmp_path / "run/ledger.jsonl")) == f"<ledger of 6 releases in {tmp_path}/run/ledger.jsonl>"
    assert repr(cw.Ledger()) == "<ledger of 0 releases>"


def test_an_evaluation_may_give_tensors(tmp_path: Path) -> None:
    run = trained(evaluate=lambda m: {"accuracy": torch.tensor(0.25)}, folder=tmp_path / "run")
    assert run.metrics[-1]["accuracy"] == 0.25
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] == 0.25


def test_an_evaluation_leaves_each_module_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    model.train()
    model[1].eval().requires_grad_(False)  # what the refusal of BatchNorm tells people to write
    statistics = model[1].running_mean.clone()
    trained(model, evaluate=lambda m: {"one": 1.0}, evaluate_every=2)
    assert [m.training for m in model] == [True, False, True, True]
    assert torch.equal(model[1].running_mean, statistics), "private data reached a buffer without noise"


def test_an_evaluation_that_fails_leaves_each_module_in_its_own_mode() -> None:
    def fail(model: nn.Module) -> Any:
        raise OSError("no such file")

    model = mlp().train()
    model[1].eval()
    with pytest.raises(OSError, match="no such file"):
        trained(model, evaluate=fail)
    assert [m.training for m in model] == [True, False, True] and model.training


# Budget


def test_batches_end_after_the_planned_steps_with_epsilon_within_the_target() -> None:
    private = made(epsilon=2.0, noise_multiplier=None, steps=5, accountant="pld")
    taken = 0
    for batch in private.batches():
        private.step(batch)
        taken += 1
    assert taken == private.steps_taken == private.ledger.releases == 5
    assert 1.9 <= private.epsilon() <= 2.0
    assert list(private.batches()) == []


@pytest.mark.parametrize(("epochs", "batch", "steps"), [(3, 10, 12), (1, 40, 1), (0.1, 10, 1), (2.5, 7, 14)])
def test_epochs_become_steps_by_the_sampling_rate(epochs: float, batch: int, steps: int) -> None:
    private = made(epochs=epochs, steps=None, batch=batch)
    assert private.steps == steps
    assert (private.noise_multiplier, private.sampling_rate) == (1.0, batch / ROWS)


def test_epsilon_counts_what_an_earlier_ledger_holds() -> None:
    ledger = cw.Ledger()
    for _ in range(6):
        ledger.record(PoissonGaussian(1.0, 10 / ROWS))
    private = made(ledger=ledger)
    already = private.epsilon()
    for batch in private.batches():
        private.step(batch)
    assert private.ledger.releases == 12 and private.epsilon() > already > 0


def test_epsilon_at_another_delta_is_that_of_the_ledger_and_the_run_s_rows_per_person() -> None:
    private = made(rows_per_person=2, accountant="pld")
    for batch in private.batches():
        private.step(batch)
    found = private.epsilon(1e-6)
    assert found == private.ledger.epsilon(1e-6, rows_per_person=2) > private.epsilon()
    assert private.epsilon() == private.epsilon(PLAN["delta"])
    for delta in (0.0, 1.0, -1e-5):
        with pytest.raises(InputError, match="delta must be"):
            private.epsilon(delta)


# Refusals and bad input


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epsilon": 3.0}, "one of epsilon or noise_multiplier"),
        ({"epochs": 3}, "one of epochs or steps"),
        ({"steps": None}, "one of epochs or steps"),
        ({"steps": 0}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"steps": True}, "steps"),
        ({"steps": None, "epochs": 0}, "epochs"),
        ({"steps": None, "epochs": -1}, "epochs"),
        ({"steps": None, "epochs": math.nan}, "epochs"),
        ({"batch": ROWS + 1}, f"at most the {ROWS} samples"),
        ({"batch": 0}, "batch"),
        ({"batch": 7.5}, "batch"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": None, "epsilon": math.inf}, "epsilon"),
        ({"delta": 0}, "delta"),
        ({"delta": 2.0}, "delta"),
        ({"noise": "secur"}, "noise"),
        ({"noise": True}, "noise"),
        ({"noise": 1.5}, "noise"),
        ({"noise": -1}, "seed"),
        ({"method": 3}, "method"),
        ({"method": cw.psac}, "method"),
        ({"method": cw.layerwise({"0": cw.flat(1.0)})}, r"2\.weight"),
    ],
)
def test_bad_settings_are_one_line_errors_before_anything_is_drawn(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        made(**changed)
    assert "\n" not in str(caught.value)


def test_a_misspelt_option_is_never_swallowed() -> None:
    with pytest.raises(TypeError, match="epsilom"):
        made(epsilom=3)
    with pytest.raises(TypeError, match="noise_multipler"):
        trained(noise_multipler=1.0)
    with pytest.raises(TypeError, match="train has no option 'ledger'"):  # the folder has one
        trained(ledger=cw.Ledger())


def test_a_delta_that_allows_publication_warns() -> None:
    with pytest.warns(UserWarning, match="1/samples"):
        made(delta=1 / ROWS)


def test_an_optimizer_that_misses_a_parameter_is_an_error_that_names_it() -> None:
    model = mlp()
    with pytest.raises(InputError, match=r"2\.weight"):
        made(model, optimizer=sgd(model[0].parameters()))
    with pytest.raises(InputError, match="no trainable parameter"):
        made(mlp().requires_grad_(False), optimizer=sgd([nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize(
    "loader",
    [
        lambda d: torch.utils.data.DataLoader(d, 10, shuffle=True),
        lambda d: torch.utils.data.DataLoader(d, 10),
        lambda d: torch.utils.data.DataLoader(
            d, 10, sampler=torch.utils.data.WeightedRandomSampler([1.0] * ROWS, ROWS)
        ),
        lambda d: torch.utils.data.DataLoader(d, 10, sampler=torch.utils.data.SubsetRandomSampler(range(5))),
        lambda d: torch.utils.data.WeightedRandomSampler([1.0] * ROWS, ROWS),
        lambda d: torch.utils.data.Subset(d, [0, 1, 1]),
    ],
)
def test_batches_that_are_no_poisson_samples_are_refused(loader: Callable[[Any], Any]) -> None:
    with pytest.raises(Refused):
        made(data=loader(torch.utils.data.TensorDataset(X, Y)), batch=2)


def test_bad_data_and_bad_models_are_refused() -> None:
    broken = X.clone()
    broken[3, 1] = math.nan
    with pytest.raises(InputError, match="row 3"):
        made(data=(broken, Y))
    with pytest.raises(InputError, match="one value per sample"):
        made(loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), self_test=True)
    batchnorm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(Refused, match=r"1 \(BatchNorm1d\)"):
        made(batchnorm)
    with pytest.raises(Refused, match="mixes"):
        made(loss=lambda m, b: cw.cross_entropy(m, b) * m(b[0]).mean().detach(), self_test=True)


def test_bad_input_leaves_no_folder(tmp_path: Path) -> None:
    for changed in ({"batch": 1000}, {"method": "psca"}, {"data": (X, Y[:3])}, {"accountant": "pdl"}, {"average": 1.0}):
        with pytest.raises(InputError):
            trained(**changed, folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_mistake_in_evaluate_is_found_before_the_first_step_where_no_folder_keeps_the_run(tmp_path: Path) -> None:
    steps: list[int] = []

    def mistaken(model: nn.Module) -> dict[str, float]:
        raise ZeroDivisionError

    def progress(private: cw.Private, row: Any) -> None:
        steps.append(private.steps_taken)

    with pytest.raises(ZeroDivisionError):
        trained(evaluate=mistaken, progress=progress)
    assert steps == []
    with pytest.raises(ZeroDivisionError):
        trained(evaluate=mistaken, progress=progress, folder=tmp_path / "run")
    assert trained(folder=tmp_path / "run", resume=True).statement.steps > 0  # what was made is not lost


def test_a_folder_in_use_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("1")
    with pytest.raises(InputError, match="not empty: choose another$"):  # nothing in it can be resumed
        trained(folder=tmp_path / "run")
    for begun in ("settings.toml", "checkpoint.pt"):  # the command's, and one made in Python
        (tmp_path / begun).mkdir()
        (tmp_path / begun / begun).write_text("")
        with pytest.raises(InputError, match="not empty: choose another, or resume what was begun in it$"):
            trained(folder=tmp_path / begun)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_written_into_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("clipwise.training.make_private", lambda *_, **__: pytest.fail("it calibrates first"))
    with pytest.raises(InputError, match=r"cannot write into the folder .*/file/run \(Not a directory\): choose"):
        trained(folder=tmp_path / "file" / "run")
    assert [place.name for place in tmp_path.iterdir()] == ["file"]


def test_resuming_without_a_run_is_an_error_that_says_how_one_script_does_both(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="resume"):
        trained(resume=True)
    folder = tmp_path / "run"
    with pytest.raises(InputError, match=r"the same line, write resume=os\.path\.exists\('.*/run/checkpoint\.pt'\)$"):
        trained(resume=True, folder=folder)
    interrupted(folder, 2, resume=os.path.exists(folder / "checkpoint.pt"))
    run = trained(folder=folder, resume=os.path.exists(folder / "checkpoint.pt"))
    assert run.statement.releases == 6


def test_resuming_a_finished_run_is_told_so(tmp_path: Path) -> None:
    trained(folder=tmp_path / "run")
    with pytest.raises(InputError, match=r"is finished: load its model\.pt, or write another folder"):
        trained(resume=True, folder=tmp_path / "run")
    with pytest.raises(InputError, match=r"choose another; the run in it is finished, and its model is model\.pt$"):
        trained(folder=tmp_path / "run")  # as a script that is started again asks, since there is no checkpoint left


# Interruption


def test_a_step_of_the_optimizer_that_is_not_the_run_s_own_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    before = theta(model)

    def make() -> Any:
        return cw.make_private(model, optimizer, (x, y), noise_multiplier=1.0, steps=2, batch=5)

    private = make()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(Refused, match="private.step"):
        optimizer.step()
    assert torch.equal(before, theta(model))
    optimizer.zero_grad()
    for batch in private.batches():
        private.step(batch)
    with pytest.raises(Refused, match="private.step"):  # after the last batch too
        optimizer.step()
    again = make()  # a second run of the same optimizer takes the first one's place
    again.step(next(again.batches()))


def interrupted(
    folder: Path, at: int, *, kept: int | None = None, error: type[BaseException] = KeyboardInterrupt, **how: Any
) -> None:
    """A run that is stopped after a step, as after a crash with the checkpoint of the one that is ``kept``, if any."""
    checkpoint, earlier = folder / "checkpoint.pt", folder.parent / "kept.pt"

    def stop(private: cw.Private, *_: Any) -> None:
        if private.steps_taken == kept:
            shutil.copy(checkpoint, earlier)
        if private.steps_taken == at:
            raise error

    with pytest.raises(error):
        trained(folder=folder, progress=stop, **how)
    if kept is not None:
        shutil.copy(earlier, checkpoint)


@pytest.mark.parametrize(
    "method",
    [
        "flat(0.5)",
        "adaptive(0.5, count_share=0.1)",
        "schedule([(0, adaptive(0.5)), (2, flat(1.0)), (5, global_(9.0))])",
    ],
)
@pytest.mark.parametrize("at", [1, 4])
def test_an_interrupted_run_ends_as_if_it_had_not_been(method: str, at: int, tmp_path: Path) -> None:
    whole = trained(method=method, average=0.9, folder=tmp_path / "whole")
    interrupted(tmp_path / "run", at, method=method, average=0.9)
    assert RunFolder(tmp_path / "run", resume=True).ledger().releases == at
    run = trained(method=method, average=0.9, folder=tmp_path / "run", resume=True)
    assert run.statement.releases == whole.statement.releases == 6
    assert run.epsilon == whole.epsilon and run.statement.method == whole.statement.method
    assert torch.equal(theta(run.model), theta(whole.model))
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in saved.items())
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def own(clip_norm: float = 1.0, **changed: Any) -> cw.Method:
    """A method that is not in the registry."""
    return replace(cw.flat(clip_norm), name="own", settings={"clip_norm": clip_norm}, **changed)


def test_a_run_with_a_method_of_one_s_own_can_be_resumed(tmp_path: Path) -> None:
    whole = trained(method=own())
    interrupted(tmp_path / "run", 2, method=own())
    run = trained(method=own(), folder=tmp_path / "run", resume=True)
    assert run.statement.releases == 6 and torch.equal(theta(run.model), theta(whole.model))


def test_a_changing_method_without_an_expression_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    def halved(clip_norm: float) -> cw.Method:
        return own(clip_norm, after=lambda *_: halved(clip_norm / 2))

    with pytest.raises(InputError, match=r"own changes from step to step .*unknown method 'own'"):
        trained(method=halved(1.0), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert trained(method=halved(1.0)).statement.releases == 6


def test_a_run_that_is_stopped_lets_go_of_its_ledger(tmp_path: Path) -> None:
    kept: list[Any] = []

    def stop(private: Any, *_: Any) -> None:
        kept.append(private)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path / "run", progress=stop)
    assert kept[0].ledger.releases == 1 and kept[0].ledger._file is None


def test_a_resumed_run_whose_data_grew_is_told_so(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 2)
    more = (torch.randn(50, 4), torch.zeros(50, dtype=torch.long))
    with pytest.raises(InputError, match="began with 40 samples and a batch of 10, got 50 and 10: that is another "):
        trained(data=more, folder=tmp_path / "run", resume=True)


def test_a_secure_run_resumes_with_the_planned_number_of_releases(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 2, noise="secure")
    assert trained(noise="secure", folder=tmp_path / "run", resume=True).statement.releases == 6


@pytest.mark.parametrize("changed", [{"noise": "secure"}, {"noise": 4}, {"noise_multiplier": 9.0}, {"batch": 5}])
def test_a_run_is_not_resumed_under_another_plan_which_its_statement_would_then_state(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    interrupted(tmp_path / "run", 2)
    (name,) = changed
    said = "the run began with" if name == "batch" else f"{name} must be what the run began with"
    with pytest.raises(InputError, match=said):
        trained(folder=tmp_path / "run", resume=True, **changed)


def test_a_run_that_the_self_test_refuses_late_can_be_ended_without_it_and_its_statement_says_so(
    tmp_path: Path,
) -> None:
    interrupted(tmp_path / "run", 2, self_test=True)
    run = trained(folder=tmp_path / "run", resume=True, self_test=False)
    assert not run.statement.self_tested and run.statement.releases == 6
    interrupted(tmp_path / "other", 2, self_test=False)
    with pytest.raises(InputError, match="self_test must be what the run began with, False, got True"):
        trained(folder=tmp_path / "other", resume=True, self_test=True)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"optimizer": torch.optim.Adam}, "optimizer must be what the run began with, SGD, got Adam"),
        ({"scheduler": None}, "scheduler must be what the run began with, StepLR, got none"),
        ({"average": 0.9}, "average must be what the run began with, none, got 0.9"),
        ({"post": "average(0.9)"}, r"post must be what the run began with, heavy_ball\(.*, got average\("),
    ],
)
def test_a_run_is_not_resumed_with_other_parts(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    began = {"scheduler": lambda o: lr_scheduler.StepLR(o, 2), "post": "heavy_ball(0.9)", "folder": tmp_path / "run"}
    interrupted(at=2, **began)
    with pytest.raises(InputError, match=name):
        trained(resume=True, **{**began, **changed})
    assert trained(resume=True, **began).statement.steps == 6


def test_another_number_of_steps_is_named_where_it_is_another_noise(tmp_path: Path) -> None:
    budget = {"noise_multiplier": None, "epsilon": 5.0, "folder": tmp_path / "run"}
    interrupted(at=2, **budget)
    with pytest.raises(InputError, match="steps must be what the run began with, 6, got 9"):
        trained(resume=True, **{**budget, "steps": 9})


def test_a_run_that_was_stopped_in_its_last_measurement_makes_it_when_resumed(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, calls = mlp(), list[int]()

    def evaluate(model: nn.Module) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"calls": len(calls)}

    how: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": 3, "folder": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        trained(model, **how)
    run = trained(model, resume=True, **how)
    assert [row["step"] for row in run.metrics] == [3, 6] and run.metrics[-1]["calls"] == 3
    assert run.statement.releases == 6
    assert not list(recwarn), "neither that there are no more batches nor that the model was trained before"


def test_a_run_that_was_stopped_in_its_first_look_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"monitor": Monitor((X[:8], Y[:8]), "private", every=6), "folder": tmp_path / "run"}
    monkeypatch.setattr(Monitor, "look", stopped)
    with pytest.raises(KeyboardInterrupt):
        trained(**how)
    monkeypatch.undo()
    run = trained(resume=True, **how)
    assert [row["step"] for row in run.diagnostics] == [0, 6] and run.statement.releases == 6


def stopped(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_what_is_seen_is_written_once_and_forgotten_after_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, 4, kept=2, evaluate=lambda m: {"x": 1.0}, evaluate_every=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')  # the machine stopped while it wrote
    with pytest.warns(UserWarning, match="2 steps since the last checkpoint are made again.* will end at ε = "):
        run = trained(evaluate=lambda m: {"x": 2.0}, evaluate_every=1, folder=folder, resume=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["x"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert run.statement.releases == 8


def test_the_papers_of_a_filter_are_cited_too() -> None:
    assert "DOPPLER" in trained(post="low_pass()").citation and "DOPPLER" not in trained().citation


def test_steps_after_the_last_checkpoint_are_repeated_and_both_times_counted(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 5, kept=2, evaluate_every=1)
    with pytest.warns(UserWarning, match="3 steps since the last checkpoint") as said:
        run = trained(evaluate_every=1, folder=tmp_path / "run", resume=True)
    assert f"ε = {rounded_up(run.epsilon)};" in str(said[0].message)
    assert run.statement.releases == 6 + 3
    assert run.epsilon == cw.epsilon(noise_multiplier=1.0, delta=1e-3, sampling_rate=0.25, steps=9, accountant="rdp")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]


def test_a_killed_run_that_measures_nothing_on_its_way_repeats_a_tenth_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "run", 5, kept=3)
    with pytest.warns(UserWarning, match="2 steps since the last checkpoint are made again"):
        run = trained(folder=tmp_path / "run", resume=True)
    assert run.statement.releases == 6 + 2
    saved, keep = [], RunFolder.save

    def save(self: RunFolder, name: str, what: Any) -> Any:
        saved.append(name)
        return keep(self, name, what)

    monkeypatch.setattr(RunFolder, "save", save)
    trained(steps=40, folder=tmp_path / "long")
    assert 10 <= saved.count("checkpoint.pt") <= 12


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_a_run_that_any_error_stopped_can_be_resumed(error: type[BaseException], tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 4, error=error)
    run = trained(folder=tmp_path / "run", resume=True)
    assert run.statement.releases >= 6 and (tmp_path / "run" / "model.pt").exists()


@pytest.mark.parametrize("kept", [0, 2])
def test_a_ledger_that_lost_releases_is_refused(kept: int, tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 4)
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.unlink()
    if kept:
        ledger.write_text("".join(lines[:kept]))
    with pytest.raises(Refused, match="ledger"):
        trained(folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize("number", ["noise_multiplier", "sampling_rate"])
def test_a_ledger_that_holds_cheaper_releases_than_were_made_is_refused(number: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 4)
    ledger = tmp_path / "run" / "ledger.jsonl"
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    events[1][number] *= {"noise_multiplier": 4, "sampling_rate": 0.25}[number]
    ledger.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(Refused, match=rf"lacks 1 of the \d+ .*{number}.* restore the ledger's file"):
        trained(folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize("line", [b"null", b"[]", b"{", b"\xff\xfe"])
def test_damaged_measurements_are_an_error_of_one_line_that_loses_nothing(line: bytes, tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 4, evaluate_every=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(line + b"\n" + metrics.read_bytes())
    before = {place: place.read_bytes() for place in (tmp_path / "run").iterdir()}
    with pytest.raises(InputError, match=r"^[^\n]*metrics\.jsonl is damaged \([^\n]*\): take out the lines[^\n]*$"):
        trained(folder=tmp_path / "run", resume=True, evaluate_every=2)
    assert {place: place.read_bytes() for place in (tmp_path / "run").iterdir()} == before
    metrics.write_bytes(before[metrics].partition(b"\n")[2])
    assert trained(folder=tmp_path / "run", resume=True, evaluate_every=2).statement.releases == 6


def test_a_power_failure_cannot_lose_releases_that_a_checkpoint_holds(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        ledger = tmp_path / "run" / "ledger.jsonl"
        synced.append("ledger" if ledger.exists() and ledger.stat().st_ino == inode else "other")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    interrupted(tmp_path / "run", 3)
    assert "ledger" in synced and synced.index("ledger") < len(synced) - 1 - synced[::-1].index("other")


def test_a_full_disk_leaves_no_partial_file_and_the_run_can_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "run"
    interrupted(folder, 2)
    before = (folder / "checkpoint.pt").read_bytes()
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 1000:  # the checkpoint, not the ledger's few lines
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="No space left on device") as caught:
            trained(folder=folder, evaluate_every=2, resume=True)
        assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.partial")) and not list(folder.glob(".*"))
    assert (folder / "checkpoint.pt").read_bytes() == before, "the last whole checkpoint is still there"
    run = trained(folder=folder, resume=True)
    assert run.statement.releases == 6 + 1 and (folder / "model.pt").exists()


def test_an_unreadable_checkpoint_is_an_input_error(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot read"):
        trained(folder=tmp_path / "run", resume=True)


# What a run takes and leaves


def test_nothing_is_left_on_parameters_after_a_run() -> None:
    model = mlp()
    trained(model, average=0.5)
    assert all(p.grad is None for p in model.parameters())
    assert not any(vars(p) for p in model.parameters())


def test_dict_batches_train() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    by_dict = trained(data={"x": X, "y": Y}, loss=loss, self_test=True)
    assert torch.equal(theta(by_dict.model), theta(trained().model))


def test_a_map_style_dataset_trains_like_its_tensors() -> None:
    rows = Made(ROWS, lambda i: (X[i], Y[i]))
    assert torch.equal(theta(trained(data=rows, self_test=True).model), theta(trained().model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", ["flat(0.5)", "adaptive(0.5)", "layerwise(psac(0.5))"])
def test_models_in_other_formats_train(dtype: torch.dtype, method: str) -> None:
    run = trained(mlp(dtype), data=(X.to(dtype), Y), method=method)
    assert all(p.dtype == dtype and p.isfinite().all() for p in run.model.parameters())
    assert not torch.equal(theta(run.model), theta(mlp(dtype)))


def test_the_same_seed_gives_the_same_model_and_another_another() -> None:
    first, again, other = (theta(trained(noise=seed).model) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_do_not_change_what_is_learnt(chunk: int) -> None:
    torch.testing.assert_close(theta(trained(chunk=chunk).model), theta(trained().model), rtol=1e-4, atol=1e-3)


def test_private_training_learns() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(400, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = mlp()
    trained(model, data=(x, y), steps=60, batch=100, method=cw.psac(1.0))
    assert float((model(x).argmax(1) == y).float().mean()) > 0.75


def test_the_report_says_epsilon_delta_method_and_what_to_cite() -> None:
    run = trained(method=cw.psac(0.3), accountant="pld", evaluate=lambda m: {"accuracy": 0.5})
    assert run.epsilon == cw.epsilon(noise_multiplier=1.0, delta=1e-3, sampling_rate=0.25, steps=6)
    for expected in (
        f"({run.epsilon:.4g}, 0.001)-differentially private",
        "psac(clip_norm=0.3",
        "6 steps",
        "add or remove one sample",
        "Poisson",
        "expected batch 10",
        "accuracy 0.5",
        cw.psac().citation.bibtex(),
    ):
        assert expected in run.report
    assert run.metrics[-1]["epsilon"] == run.epsilon
    measured = {"step": 6, "epsilon": 2.00041, "loss": 0.50041}
    assert "measured: step 6, epsilon 2.001, loss 0.5004\n" in replace(run, metrics=(measured,)).report


def test_the_report_cites_the_papers_of_all_that_a_method_is_made_of() -> None:
    run = trained(method=cw.inner_momentum(cw.psac()))
    for method in (cw.inner_momentum(), cw.psac()):
        assert method.citation.bibtex() in run.citation and method.citation.bibtex() in run.report
    assert run.citation.count("@inproceedings") == 2


def test_the_statement_names_a_seeded_generator_and_a_test_that_was_left_out() -> None:
    seeded = made(noise=77).statement()
    assert seeded.generator == "seeded(77)" and "seeded(77)" in seeded.text() and "subtract this noise" in seeded.text()
    assert not seeded.self_tested and "turned off" in seeded.text()
    assert str(seeded) == f"{seeded}" == seeded.text() and repr(seeded).startswith("Statement(epsilon=")
    secure = made(noise="secure", self_test=True).statement()
    assert secure.generator == "AES-256-CTR, on CUDA ChaCha20" and "subtract" not in secure.text()
    assert "passed" in secure.text()


def test_a_run_s_folder_holds_ledger_metrics_model_and_statement(tmp_path: Path) -> None:
    run = trained(folder=tmp_path / "run", evaluate=lambda m: {"accuracy": 0.5}, evaluate_every=3)
    assert run.folder == tmp_path / "run"
    statement = json.loads((run.folder / "statement.json").read_text())
    assert statement["epsilon"] == run.epsilon and statement["generator"] == "seeded(3)"
    assert (run.folder / "statement.txt").read_text() == run.statement.text()
    assert statement["model"] == hashlib.sha256((run.folder / "model.pt").read_bytes()).hexdigest()
    assert statement["model"] in run.statement.text() and statement["made"] in run.statement.text()
    assert len((run.folder / "ledger.jsonl").read_text().splitlines()) == 6
    assert [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()] == [3, 6]
    assert not list(run.folder.glob(".*"))


def test_what_only_the_data_s_owner_may_see_is_not_in_the_folder(tmp_path: Path) -> None:
    kept: list[Any] = []
    trained(folder=tmp_path / "run", progress=lambda step, *_: kept.append(None))
    written = "".join(p.read_text() for p in (tmp_path / "run").iterdir() if p.suffix in (".json", ".jsonl", ".txt"))
    assert kept and not any(word in written for word in ('samples":', "non_finite", "indices", "loss"))


def test_what_a_whole_run_warns_of_points_to_the_user_s_own_line() -> None:
    with pytest.warns(UserWarning, match="20 rows of the data are copies") as said:
        trained(nn.Linear(9, 3), (torch.randn(20, 9).repeat(2, 1), Y[:40]))
    assert said[0].filename == __file__


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_s_ledger_counts_in_the_next_run_on_the_same_data_with_and_without_a_folder(
    kept: bool, tmp_path: Path
) -> None:
    first = trained(folder=tmp_path / "first" if kept else None)
    assert first.ledger.releases == PLAN["steps"]
    assert first.ledger.epsilon(PLAN["delta"], "rdp") == first.epsilon
    if kept:
        assert first.ledger.path == tmp_path / "first" / "ledger.jsonl"
    second = trained(spent=first.ledger)
    assert second.ledger.releases == 2 * PLAN["steps"]
    assert first.ledger.releases == PLAN["steps"]
    assert second.epsilon > first.epsilon


def test_what_was_spent_before_counts_towards_epsilon_and_stands_in_the_statement(tmp_path: Path) -> None:
    from clipwise.accounting import Ledger
    from clipwise.types import Gaussian

    torch.manual_seed(0)
    data = (torch.randn(200, 3), torch.randint(0, 2, (200,)))
    plan: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-4, "steps": 4, "batch": 50, "noise": 0}
    before = Ledger()
    before.record(Gaussian(4.0, "a histogram"))

    def run(folder: str, **how: Any) -> Any:
        return cw.train(nn.Linear(3, 2), cw.cross_entropy, data, folder=tmp_path / folder, **plan, **how)

    alone, together = run("alone"), run("together", spent=before)
    assert together.statement.noise_multiplier > alone.statement.noise_multiplier
    assert 1.9 < together.epsilon <= 2.0  # both together
    entries = Ledger(tmp_path / "together" / "ledger.jsonl").entries
    assert [count for _, count in entries] == [1, 4] and entries[0] == before.entries[0]
    before.record(Gaussian(0.5, "far too much"))
    with pytest.raises(InputError, match="epsilon=2 is spent"):
        run("nothing", spent=before)
    assert not (tmp_path / "nothing").exists()
