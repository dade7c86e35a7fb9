"""The bench: every column computes the same update, so that their times may be compared."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.bench import CASES, COLUMNS, GPU_CASES, GPU_COLUMNS, Case, Cell, Row, Step, Table, as_text, bench, slowest
from clipwise.bench.cases import losses
from clipwise.bench.columns import LOOKS, _for_opacus, clipwise_step, look_step, method_step
from clipwise.bench.memory import peak_megabytes
from clipwise.bench.targets import targets
from clipwise.cli import main
from clipwise.diagnostics import Diagnosis, Monitor
from clipwise.methods import parse
from clipwise.models import lstm_classifier, small_transformer
from clipwise.records import Capture
from clipwise.types import InputError


def tiny_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


TINY = {
    "cnn": Case("tiny CNN", 5, (1, 6, 6), tiny_cnn, 3),
    # one head, because Opacus's attention orders several heads in its own way
    "transformer": Case("tiny transformer", 5, (4,), partial(small_transformer, 11, 8, 1, 1, 3, 4), 3, 11),
    "lstm": Case("tiny LSTM", 5, (4,), partial(lstm_classifier, 11, 6, 5, 3), 3, 11),
}
# next to no noise: clipwise refuses to release with none
QUIET = {name: replace(case, noise_multiplier=1e-9, learning_rate=1.0) for name, case in TINY.items()}
PRIVATE = [column for column in COLUMNS if column != "plain"]


def step_of(column: str, case: Case) -> Step:
    if column.startswith("opacus"):
        pytest.importorskip("opacus")
    return COLUMNS[column](case)


def model_of(column: str, case: Case) -> nn.Module:
    return _for_opacus(case) if column.startswith("opacus") else case.model()


def sample_gradients(model: nn.Module, case: Case) -> list[dict[str, Tensor]]:
    """One sample at a time: the reference."""
    inputs, labels = case.data()
    gradients = []
    for index in range(case.batch):
        model.zero_grad()
        losses(model, (inputs[index : index + 1], labels[index : index + 1])).sum().backward()
        gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})
    return gradients


def norm(gradient: dict[str, Tensor]) -> float:
    return float(sum(value.square().sum() for value in gradient.values()) ** 0.5)


def expected(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """The parameters after one step of clipped, noiseless SGD."""
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    for gradient in sample_gradients(model, case):
        weight = min(1.0, case.clip_norm / norm(gradient))
        for name, value in gradient.items():
            after[name] -= case.learning_rate * weight * value / case.batch
    return after


def assert_trains_as(step: Step, reference: dict[str, Tensor]) -> None:
    step()
    after = dict(step.model.named_parameters())
    assert after.keys() == reference.keys()
    for name, value in reference.items():
        # updates are about 0.1; clipwise shrinks its weights by 8e-6 so that the bound holds after rounding
        torch.testing.assert_close(after[name].detach(), value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("column", PRIVATE)
def test_without_noise_every_private_column_makes_the_same_clipped_step(name: str, column: str) -> None:
    norms = sorted(norm(gradient) for gradient in sample_gradients(QUIET[name].model(), QUIET[name]))
    case = replace(QUIET[name], clip_norm=norms[2])  # two samples below, two above
    assert norms[1] < norms[3]
    assert_trains_as(step_of(column, case), expected(model_of(column, case), case))


@pytest.mark.parametrize("name", TINY)
def test_without_noise_or_clipping_the_plain_column_makes_the_same_step(name: str) -> None:
    case = replace(QUIET[name], clip_norm=1e9)
    assert_trains_as(step_of("plain", case), expected(case.model(), case))


@pytest.mark.parametrize("name", TINY)
def test_the_layers_swapped_for_opacus_compute_the_same_function(name: str) -> None:
    pytest.importorskip("opacus")
    inputs, _ = TINY[name].data()
    torch.testing.assert_close(_for_opacus(TINY[name])(inputs), TINY[name].model()(inputs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("column", PRIVATE)
def test_every_private_column_adds_noise_of_the_same_scale(column: str) -> None:
    case = replace(QUIET["transformer"], noise_multiplier=2.0, clip_norm=0.5)
    step, quiet = step_of(column, case), expected(model_of(column, case), case)
    torch.manual_seed(0)  # from which the peers draw
    step()
    noise = torch.cat([(value.detach() - quiet[name]).flatten() for name, value in step.model.named_parameters()])
    deviation = 0.0 if column == "without_noise" else 2.0 * 0.5 / case.batch
    # 6.8 standard errors of 1019 entries, for peers that draw in another order in another version
    assert float(noise.std()) == pytest.approx(deviation, rel=0.15, abs=1e-5)


def test_a_case_gives_the_same_model_and_data_at_each_call_and_leaves_the_random_state() -> None:
    case, state = CASES["small_transformer"], torch.get_rng_state()
    first, second = case.model(), case.model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(case.data(), case.data(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_columns_take_turns_with_garbage_collection_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def recorder(column: str) -> Step:
        return Step(nn.Identity(), lambda: seen.append((column, gc.isenabled())))

    for column in ("plain", "vmap"):
        monkeypatch.setitem(COLUMNS, column, lambda _, column=column: recorder(column))
    bench(["mnist_cnn"], ["vmap"], rounds=3, memory=False, batch=2)
    assert seen[-6:] == [("plain", False), ("vmap", False)] * 3
    assert gc.isenabled()


def measure_memory_of(column: str, patch: pytest.MonkeyPatch) -> None:
    """Of this column alone, since each takes a process of its own; that of the others is made up."""

    def peak(row: str, own: str, batch: int, threads: int) -> float | str:
        return peak_megabytes(row, own, batch, threads) if own == column else 100.0

    patch.setattr("clipwise.bench.run.peak_megabytes", peak)


def test_the_table_holds_times_memory_and_ratios_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_memory_of("vmap", monkeypatch)
    table = bench(["mnist_cnn"], ["vmap"], rounds=3, batch=2)
    (row,) = table.rows
    plain, private = row.cells
    assert (row.batch, plain.column, private.column) == (2, "plain", "vmap")
    assert plain.ratio == plain.memory_ratio == 1
    assert private.milliseconds == sorted(private.rounds)[1]
    assert private.ratio == pytest.approx(private.milliseconds / plain.milliseconds)
    assert private.megabytes > 0 and private.missing is None
    assert private.memory_ratio == pytest.approx(private.megabytes / 100)
    assert table.threads == torch.get_num_threads()
    assert f"{private.ratio:.2f}× (memory" in as_text(table) and "milliseconds and megabytes" in as_text(table)


def test_a_table_measured_on_a_busy_machine_says_so() -> None:
    quiet = Cell("plain", milliseconds=10.0, ratio=1.0, rounds=(9.0, 10.0, 90.0))
    busy = Cell("vmap", milliseconds=80.0, ratio=8.0, rounds=(20.0, 80.0, 90.0))
    table = Table((Row("lstm", "LSTM", 64, (quiet, busy)),), rounds=3, threads=2, torch="2", machine="")
    assert table.as_dict()["unsteady"] == ["lstm/vmap"]
    assert "Do not trust lstm/vmap: the machine was busy" in as_text(table)


def test_peak_memory_is_the_steps_own_and_not_its_parents_and_grows_with_the_batch() -> None:
    ballast = torch.ones(75_000_000)  # 300 MB
    small, large = (peak_megabytes("mnist_cnn", "plain", batch, 1) for batch in (2, 1024))
    assert isinstance(small, float) and 0 < small < 150
    assert isinstance(large, float) and large > small + 30
    del ballast


def test_a_peer_that_fails_leaves_a_dash_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(case: Case) -> Step:
        raise ModuleNotFoundError("No module named 'opacus'")

    monkeypatch.setitem(COLUMNS, "opacus_ghost", absent)
    table = bench(["mnist_cnn"], ["opacus_ghost"], rounds=1, memory=False, batch=2)
    cell = table.rows[0].cells[1]
    assert cell.milliseconds is None and cell.missing == "ModuleNotFoundError: No module named 'opacus'"
    assert as_text(table).endswith(f"– opacus_ghost on MNIST CNN: {cell.missing}: write pip install 'clipwise[bench]'")
    assert " | – |" in as_text(table)


def test_an_unknown_row_or_column_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown row 'mnist': did you mean 'mnist_cnn'\?"):
        bench(["mnist"])
    with pytest.raises(InputError, match=r"unknown column 'opacus_host': did you mean 'opacus_ghost'\?"):
        bench(["mnist_cnn"], ["opacus_host"])
    with pytest.raises(InputError, match="rounds must be a whole number of at least 1, got 0"):
        bench(rounds=0)


def test_the_command_prints_json_or_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--rows", "mnist_cnn", "--columns", "vmap", "--rounds", "1", "--batch", "2", "--no-memory"]
    assert main([*command, "--json", "--profile"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [cell["column"] for cell in table["rows"][0]["cells"]] == ["plain", "vmap"]
    assert "norm" in table["profile"]["mnist_cnn"][0]
    assert main(["bench", "--rows", "lstn"]) == 2
    assert capsys.readouterr().err == "error: unknown row 'lstn': did you mean 'lstm'?\n"


def test_a_row_is_told_as_soon_as_it_is_measured_and_a_profile_follows_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["bench", "--rows", "mnist_cnn", "lstm", "--columns", "clipwise", "--rounds", "1", "--batch", "2"]
    assert main([*command, "--no-memory", "--profile"]) == 0
    shown = capsys.readouterr()
    (line,) = [line for line in shown.out.splitlines() if line.startswith("| MNIST CNN [2]")]
    assert shown.err.index(line) < shown.err.index("LSTM, 50 tokens, float32: warming up plain")
    assert shown.out.index(line) < shown.out.index("mnist_cnn, the slowest layers")
    assert "megabytes" not in shown.out


def test_on_a_terminal_a_row_is_shown_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    command = ["bench", "--rows", "mnist_cnn", "--columns", "clipwise", "--rounds", "1", "--batch", "2", "--no-memory"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "warming up" in shown.err and "| MNIST" not in shown.err and shown.out.count("| MNIST") == 1


def test_a_column_that_fails_while_it_is_timed_loses_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take() -> None:
        taken.append(1)
        if len(taken) == 4:  # two steps to warm up, then the second round
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(COLUMNS, "vmap", lambda _: Step(nn.Identity(), take))
    plain, failed = bench(["mnist_cnn"], ["vmap"], rounds=3, memory=False, batch=2).rows[0].cells
    assert len(plain.rounds) == 3 and len(taken) == 4
    assert failed.milliseconds is None and failed.missing == "OutOfMemoryError: no room"


def test_ordinary_steps_are_compiled_in_every_row_of_a_long_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    original, compiled = torch.compile, list[str]()

    def noted(function: object, **_: object) -> object:
        return original(function, backend=lambda graph, _: compiled.append("once") or graph)

    monkeypatch.setattr(torch, "compile", noted)
    monkeypatch.setitem(COLUMNS, "vmap", GPU_COLUMNS["compiled"])
    for batch in range(2, 13):  # torch gives up after eight
        row = bench(["mnist_cnn"], ["vmap"], rounds=1, memory=False, batch=batch).rows[0]
        assert row.cells[1].missing is None
        assert compiled.pop() == "once" and not compiled


def test_the_compiled_column_makes_the_eager_column_s_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    for name, case in QUIET.items():
        steps = [clipwise_step(case, compiled=flag) for flag in (False, True)]
        for step in steps:
            step()
        for one, other in zip(*(step.model.parameters() for step in steps), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_methods_are_compared_with_flat_and_with_what_they_should_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_memory_of("method bam(flat())", monkeypatch)
    table = bench(["mnist_cnn"], rounds=1, batch=3, methods=["psac(clip_norm=0.5)", "bam(flat())"])
    plain, flat, psac, bam = table.rows[0].cells
    assert [plain.column, flat.column, psac.column] == ["plain", "method flat", "method psac(clip_norm=0.5)"]
    assert all(cell.missing is None and (cell.megabytes or 0) > 0 for cell in (flat, psac, bam))
    assert flat.ratio == 1 and psac.ratio == pytest.approx(psac.milliseconds / flat.milliseconds)
    assert bam.memory_ratio == pytest.approx(bam.megabytes / flat.megabytes) and psac.megabytes == 100 != bam.megabytes
    assert (psac.target, bam.target, bam.memory_target) == (None, 2.5, 2.0)
    shown = as_text(replace(table, rows=(replace(table.rows[0], cells=(flat, replace(bam, ratio=2.6))),)))
    assert "| flat | bam(flat()) |" in shown and "| 2.60× > 2.5; memory" in shown
    with pytest.raises(InputError, match="unknown method 'bum'"):
        bench(["mnist_cnn"], methods=["bum(flat())"])


def test_what_a_method_should_cost_follows_its_settings_and_combinations_have_no_target() -> None:
    assert targets(parse("inner_momentum(flat(), horizon=3)")) == (pytest.approx(4.4), None)
    assert targets(parse("self_augmentation(psac(), views=4)")) == (pytest.approx(4.2), None)
    assert targets(parse("dice(flat())")) == (1.2, None)
    for free in ("psac", "bam(flat(), form='exact')", "bam(self_augmentation(flat()))", "dp_sat(flat())"):
        assert targets(parse(free)) == (None, None)


def test_a_look_at_the_gradients_is_a_share_of_fifty_steps_beside_its_target() -> None:
    table = bench(["mnist_cnn"], rounds=1, batch=3, memory=False, diagnostics=True)
    plain, flat, *looks = table.rows[0].cells
    assert [cell.column for cell in (plain, flat)] == ["plain", "method flat"]
    assert [cell.column for cell in looks] == ["look, own method", "look, five methods"]
    for cell in looks:
        assert cell.missing is None and cell.target == pytest.approx(0.03 * 50)
        assert cell.ratio == pytest.approx(cell.milliseconds / flat.milliseconds)
    own, five = replace(looks[0], ratio=1.24), replace(looks[1], ratio=1.6)
    shown = as_text(replace(table, rows=(replace(table.rows[0], cells=(plain, flat, own, five)),)))
    assert "share of 50 such steps" in shown and "Methods as" not in shown
    assert "| flat | look, own method | look, five methods |" in shown
    assert shown.endswith(f"| {flat.milliseconds:.1f} ms | 2.5 % ≤ 3 | 3.2 % > 3 |")


def test_looks_and_methods_have_a_table_each(capsys: pytest.CaptureFixture[str]) -> None:
    table = bench(["mnist_cnn"], ["vmap"], rounds=1, batch=2, memory=False, methods=["psac"], diagnostics=True)
    heads = [line for line in as_text(table).splitlines() if line.startswith("| model")]
    assert heads == [
        "| model [batch] | plain | vmap |",
        "| model [batch] | flat | psac |",
        "| model [batch] | flat | look, own method | look, five methods |",
    ]
    command = ["bench", "--rows", "mnist_cnn", "--batch", "2", "--rounds", "1", "--no-memory", "--diagnostics"]
    assert main(command) == 0
    assert heads[2] in capsys.readouterr().out


def test_a_look_goes_through_the_methods_that_its_column_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Diagnosis] = []
    look = Monitor.look
    monkeypatch.setattr(Monitor, "look", lambda *given, **named: found.append(look(*given, **named)))
    for methods in LOOKS.values():
        step = look_step(TINY["cnn"], methods=methods)
        before = [p.clone() for p in step.model.parameters()]
        step()
        assert all(torch.equal(*pair) for pair in zip(before, step.model.parameters(), strict=True))
    assert [len(each.methods) for each in found] == [1, 5] and all(each.samples == 5 for each in found)
    assert all(effect.whole.noise for each in found for effect in each.methods.values())


def test_a_method_that_looks_back_is_timed_once_it_has_something_to_look_at() -> None:
    assert method_step(QUIET["cnn"], method="inner_momentum(flat(), horizon=5)").warm_up == 5
    assert method_step(QUIET["cnn"], method="flat").warm_up == 2


def test_a_method_is_timed_in_bfloat16_too() -> None:
    method_step(replace(CASES["mnist_cnn"], batch=4, narrow=True), method="bam(flat())")()


def test_ratios_on_a_gpu_are_to_the_fastest_ordinary_step() -> None:
    cells = [
        Cell("plain", 20.0, rounds=(20.0,)),
        Cell("graph", 10.0, rounds=(10.0,)),
        Cell("clipwise", 12.0, rounds=(12.0,)),
    ]
    row = Row("gru", "GRU", 5, (*cells, Cell("channels_last", missing="tokens")), "bf16")
    assert row.reference.column == "graph"
    table = Table((replace(row, cells=tuple(replace(c, ratio=1.2) for c in row.cells)),), 1, 1, "2", "GPU", "cuda")
    assert "| GRU, bf16 [5] | 20.00 (1.20×)" in as_text(table) and "fastest ordinary" in as_text(table)


def test_every_gpu_row_has_a_model_and_a_batch_of_its_own_size() -> None:
    for name in ("mnist_cnn", "resnet20_gn", "wrn_16_4", "gru"):
        case = replace(GPU_CASES[name], batch=2)
        assert losses(case.model(), case.data()).shape == (2,)
    assert sum(p.numel() for p in GPU_CASES["wrn_16_4"].model().parameters()) == pytest.approx(2.75e6, rel=0.01)
    assert set(GPU_COLUMNS) >= set(COLUMNS) | {"compiled", "graph", "channels_last"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_its_bench_is_an_error() -> None:
    with pytest.raises(InputError, match="write --device cpu"):
        bench(device="cuda")


def test_next_tokens_are_labels_and_a_sample_s_loss_is_its_tokens_mean() -> None:
    class Echo(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.one_hot(tokens, 7).float()[:, :-1].transpose(1, 2)

    case = Case("echo", 3, (5,), Echo, 7, 7, next_token=True)
    tokens, labels = case.data()
    assert torch.equal(labels, tokens[:, 1:])
    each = torch.stack([F.cross_entropy(F.one_hot(t[:-1], 7).float(), t[1:]) for t in tokens])
    torch.testing.assert_close(case.losses(Echo(), (tokens, labels)), each)


def test_the_slowest_layers_are_named_with_their_form() -> None:
    case = QUIET["transformer"]
    layers = slowest(Capture(case.model(), losses)(case.data()), most=3)
    assert len(layers) == 3 and layers[0].norm + layers[0].total >= layers[2].norm + layers[2].total > 0
    names = dict(case.model().named_parameters())
    assert all(layer.name in names and layer.form in str(layer) for layer in layers)
