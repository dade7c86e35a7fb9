"""Several processes that make one run: they release what one process would, with noise drawn once."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Before there are processes: optimizers import it, and its functions hold on to the processes there are by then. Gloo's
# threads would outlive destroy_process_group and now and then abort a child at its end (PyTorch 2.13).
import torch.distributed.nn.functional
from torch import nn

import clipwise as cw
from clipwise.types import InputError, PoissonGaussian, Refused

ROOT = Path(__file__).parent.parent
PROCESSES, SAMPLES = 2, 60
METHODS = (
    "psac(0.5)",
    "layerwise(automatic(0.5))",
    "adaptive(0.5)",
    "inner_momentum(self_augmentation(flat(0.5), views=2, augment='own'), horizon=1)",
    "bam(flat(0.5))",
    "disk(flat(0.5))",
    "dice(flat(0.5), feedback_norm=0.1)",
)


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, 6, generator=generator).double(), torch.randint(0, 3, (SAMPLES,), generator=generator)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def shaken(rows: Any, count: int, generator: torch.Generator) -> Any:
    x, y = (part.repeat_interleave(count, 0) for part in rows)
    return x + 0.1 * torch.randn(x.shape, generator=generator, device=generator.device).to(x), y


def private_for(model: nn.Module, rows: Any = None, **options: Any) -> cw.Private:
    settings = {"noise_multiplier": 0.7, "steps": 4, "batch": 20, "chunk": 8, "views": shaken, **options}
    given = data() if rows is None else rows
    return cw.make_private(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), given, **settings)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(method: str, device: str = "cpu", **options: Any) -> torch.Tensor:
    model = net().to(device)
    private = private_for(model, method=method, noise=7, self_test=False, **options)
    for batch in private.batches():
        private.step(batch)
    return weights(model).cpu()


def of_noise_alone() -> tuple[torch.Tensor, float]:
    """A release in which no sample takes part, since none has a gradient."""
    model = nn.Linear(200, 100, bias=False)
    x = torch.zeros(SAMPLES, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"noise_multiplier": 2.0, "steps": 1, "batch": 6, "method": "flat(0.5)"}
    private = cw.make_private(model, optimizer, (x, torch.zeros(SAMPLES).long()), self_test=False, **settings)
    before = weights(model)
    for batch in private.batches():
        private.step(batch)
    return weights(model) - before, 2.0 * 0.5 / 6


def message(attempt: Callable[[], object]) -> str:
    with pytest.raises((InputError, Refused)) as error:
        attempt()
    return f"{type(error.value).__name__}: {error.value}"


def out_of_step() -> None:
    private = private_for(net(), self_test=False)
    if dist.get_rank():
        private._stream.at(0)  # this process has begun a step that the others have not
    private.step(next(private.batches()))


def of_its_own_weights() -> None:
    model = net()
    private = private_for(model, self_test=False)
    with torch.no_grad():
        model[0].weight += dist.get_rank()
    private.step(next(private.batches()))


def one_release() -> cw.Ledger:
    ledger = cw.Ledger()
    ledger.record(PoissonGaussian(1.0, 0.1))
    return ledger


def whole_run(folder: Path | None, **options: Any) -> cw.Run:
    settings = {"noise": 7, "batch": 20, "method": "adaptive(0.5)", "self_test": False, **options}
    model = net(dist.get_rank() if dist.is_initialized() else 0)
    return cw.train(model, cw.cross_entropy, data(), noise_multiplier=0.7, steps=4, folder=folder, **settings)


class Stop(Exception):
    pass


def stopped_and_resumed(folder: Path, after: int = 2, **options: Any) -> cw.Run:
    def stop(private: cw.Private, seen: Any) -> None:
        if private.steps_taken == after:
            raise Stop

    with pytest.raises(Stop):
        whole_run(folder, progress=stop, **options)
    return whole_run(folder, resume=True, **options)


def evaluated_by_all(place: Path) -> tuple[int, tuple[Any, ...]]:
    """An evaluation that adds over all processes must be made equally often in each."""
    calls = 0

    def evaluate(model: nn.Module) -> dict[str, float]:
        nonlocal calls
        calls += 1
        return {"calls": calls}

    whole_run(None, evaluate=evaluate)
    whole_run(place / "evaluated", evaluate=evaluate, evaluate_every=2)
    resumed = stopped_and_resumed(place / "at the end", after=4, evaluate=evaluate, evaluate_every=2)
    return calls, resumed.metrics


def one_of_several(rank: int, place: str) -> None:
    """What each process does, all in one start of them; the tests look at what it leaves."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=PROCESSES)
    try:
        model = net(seed=rank)
        private = private_for(model, noise="secure", method="psac(0.5)")
        private.step(batch := next(private.batches()))
        run, resumed = whole_run(Path(place) / "run"), stopped_and_resumed(Path(place) / "stopped")
        left = {
            "trained": {method: trained(method) for method in METHODS},
            "small batches": trained("flat(0.5)", batch=1),
            "secure": weights(model),
            "own seeds": private._stream.at(0).seed(),
            "drawn": (batch.indices, private._indices, private.epsilon()),
            "noise": of_noise_alone(),
            "run": (weights(run.model), run.epsilon),
            "resumed": (weights(resumed.model), resumed.epsilon),
            "evaluated": evaluated_by_all(Path(place)),
            "said": {
                "data": message(lambda: private_for(net(), data(seed=rank))),
                "steps": message(lambda: private_for(net(), steps=4 + rank)),
                "seeds": message(lambda: private_for(net(), noise=rank)),
                "spent": message(lambda: private_for(net(), ledger=None if rank else one_release())),
                "units": message(lambda: private_for(net(), method="p_average(flat(0.5), size=2)")),
                "momenta": message(lambda: private_for(net(), method="momentum_per_sample()", batch=SAMPLES)),
                "exchanged": message(lambda: setattr(private, "method", cw.p_average())),
                "out of step": message(out_of_step),
                "weights": message(of_its_own_weights),
            },
        }
        torch.save(left, f"{place}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def one_on_a_gpu(rank: int, place: str) -> None:
    """What each of several processes on one GPU does."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=PROCESSES)
    try:
        left = {method: trained(method, "cuda") for method in METHODS}
        torch.save(left, f"{place}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process leaves."""
    place = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(one_of_several, (str(place),), nprocs=PROCESSES)
    return [{"place": place, **torch.load(place / f"{rank}.pt")} for rank in range(PROCESSES)]


@pytest.mark.parametrize("method", METHODS)
def test_several_processes_train_as_one_does(left: list[dict[str, Any]], method: str) -> None:
    alone = trained(method)
    for one in left:
        torch.testing.assert_close(one["trained"][method], alone, rtol=1e-6, atol=1e-8)
    assert torch.equal(left[0]["trained"][method], left[1]["trained"][method])


def test_a_process_whose_share_is_empty_goes_along(left: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(left[1]["small batches"], trained("flat(0.5)", batch=1), rtol=1e-6, atol=1e-8)


def test_secret_draws_and_noise_are_the_same_in_all_processes_which_begin_as_the_first(left: Any) -> None:
    assert torch.equal(left[0]["secure"], left[1]["secure"])
    assert left[0]["own seeds"] != left[1]["own seeds"]  # of dropout's masks


def test_each_drawn_sample_is_in_one_process_alone(left: list[dict[str, Any]]) -> None:
    (drawn, first, spent), (same, second, spent_there) = (one["drawn"] for one in left)
    assert torch.equal(drawn, same) and spent == spent_there > 0
    assert torch.equal(torch.cat([first, second]).sort().values, drawn)


def test_noise_is_drawn_once_whatever_the_number_of_processes(left: list[dict[str, Any]]) -> None:
    (moved, deviation), (same, _) = (one["noise"] for one in left)
    assert torch.equal(moved, same)
    assert abs(float(moved.std()) / deviation - 1) < 6 / math.sqrt(2 * moved.numel())


def test_a_run_of_several_processes_leaves_one_folder_and_is_resumed(
    left: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = whole_run(tmp_path / "run")
    for one in left:
        for name in ("run", "resumed"):
            torch.testing.assert_close(one[name][0], weights(alone.model), rtol=1e-6, atol=1e-8)
            assert one[name][1] == alone.epsilon
    for name in ("run", "stopped"):
        folder = left[0]["place"] / name
        assert {file.name for file in folder.iterdir()} == {file.name for file in alone.folder.iterdir()}  # type: ignore[union-attr]
        assert cw.Ledger(folder / "ledger.jsonl").releases == 4


def test_every_process_evaluates_equally_often_and_knows_what_was_measured(left: list[dict[str, Any]]) -> None:
    calls, measured = left[0]["evaluated"]
    assert calls == 2 + 2 + 2  # before the first step only where no folder would keep the run
    assert [row["step"] for row in measured] == [2, 4]
    assert left[1]["evaluated"] == (calls, measured)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("data", r"expected the same data in each, got .* give every process the same data, all of it"),
        ("steps", r"expected the same steps in each, got [45] and [45]"),
        ("seeds", r"expected the same noise in each, got seeded\([01]\) and seeded\([01]\)"),
        ("spent", r"expected the same spent in each, got .*1 × PoissonGaussian"),
        ("units", "p_average needs the whole batch in one process"),
        ("momenta", "momentum_per_sample needs the whole batch in one process"),
        ("exchanged", "p_average needs the whole batch in one process"),
        ("out of step", "Refused: the processes of this run are not at the same step"),
        ("weights", "the processes of this run train different models"),
    ],
)
def test_processes_that_do_not_make_one_run_are_refused(left: list[dict[str, Any]], what: str, says: str) -> None:
    for one in left:
        assert re.search(says, one["said"][what]), one["said"][what]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_several_processes_on_a_gpu_train_as_one_does(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_on_a_gpu, (str(tmp_path),), nprocs=PROCESSES)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES))
    for method in METHODS:
        assert torch.equal(first[method], second[method])
        torch.testing.assert_close(first[method], trained(method, "cuda"), rtol=1e-5, atol=1e-6)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "one of 8 processes that torchrun started" in message(lambda: private_for(net()))
    monkeypatch.setenv("WORLD_SIZE", "1")
    private_for(net())


def test_the_page_on_several_gpus_runs_in_two_processes(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/several-gpus.md").read_text(), re.DOTALL)
    (tmp_path / "several.py").write_text(script)
    command = f"-m torch.distributed.run --standalone --nproc-per-node {PROCESSES} several.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if torch.cuda.device_count() < PROCESSES:  # it gives each process a GPU of its own
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("differentially private") == 1, done.stdout  # one process speaks
    assert cw.Ledger(tmp_path / "runs/several/ledger.jsonl").releases == 20
