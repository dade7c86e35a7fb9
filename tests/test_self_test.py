"""The start-up self-test: what mixes samples or cannot be followed is refused by name, and the model is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cases import CASES, SAMPLES, Parts, integers, loss, normal
from clipwise.records import checks
from clipwise.records.checks import check_samples, refuse_modules
from clipwise.types import InputError, Refused


class Centred(nn.Module):
    """Subtracts the batch's mean, as a module of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 3)).double()


# ── what passes ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CASES)
def test_a_good_model_passes(name: str) -> None:
    check_samples(CASES[name].model(), loss, CASES[name].batch())


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_any_number_of_samples_will_do(samples: int) -> None:
    check_samples(network(), loss, (normal(4, samples=samples),))


def test_a_model_with_dropout_passes_in_training_mode() -> None:
    check_samples(network(nn.Dropout(0.5)).train(), loss, (normal(4),))


def test_batch_norm_in_eval_mode_passes() -> None:
    check_samples(network(nn.BatchNorm1d(6)).eval(), loss, (normal(4),))


def test_a_model_in_float32_passes() -> None:
    check_samples(network().float(), loss, (normal(4).float(),))


def test_a_sparse_embedding_passes() -> None:
    check_samples(nn.Embedding(7, 3, sparse=True).double(), loss, (integers(7, 5),))


def test_a_sample_that_is_not_finite_is_no_reason_to_fail() -> None:
    x = normal(4)
    x[1] = torch.nan
    check_samples(network(), loss, (x,))


# ── modules that are refused by what they are ───────────────────────────────────────────────────────────────────────

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), r"nn\.GroupNorm\(num_groups, 6\).*\.eval\(\)"),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), r"nn\.GroupNorm\(num_groups, 6\)"),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6), r"nn\.GroupNorm\(num_groups, 6\)"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(6), r"nn\.GroupNorm\(num_groups, 6\)"),
    "BatchNorm1d without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False).eval(), "GroupNorm"),
    "BatchNorm1d without parameters": (lambda: nn.BatchNorm1d(6, affine=False), "GroupNorm"),
    "InstanceNorm1d with statistics": (
        lambda: nn.InstanceNorm1d(6, track_running_stats=True),
        "track_running_stats=False",
    ),
    "InstanceNorm2d with statistics": (
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        "track_running_stats=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_keeps_or_uses_the_batchs_statistics_is_refused_by_name(name: str) -> None:
    make, fix = REFUSED[name]
    model = nn.Sequential(nn.Linear(4, 6), nn.ModuleDict({"inside": make()}))
    for check in (refuse_modules, lambda model: check_samples(model, loss, (normal(4),))):
        with pytest.raises(Refused, match=fix) as caught:
            check(model)
        assert f"1.inside ({name.split()[0]})" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_model_that_is_itself_such_a_module_is_refused() -> None:
    with pytest.raises(Refused, match=r"the model \(BatchNorm1d\)"):
        refuse_modules(nn.BatchNorm1d(3))


def test_instance_norm_with_statistics_passes_in_eval_mode() -> None:
    refuse_modules(nn.InstanceNorm2d(3, track_running_stats=True).eval())
    refuse_modules(nn.InstanceNorm2d(3).train())


# ── what is refused by what it does ─────────────────────────────────────────────────────────────────────────────────


def test_a_module_of_the_users_own_that_mixes_samples_is_refused_by_name() -> None:
    """Before the first parameter, so that only a change of another sample's values can show it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), Centred(), nn.Linear(4, 3)).double()
    with pytest.raises(Refused, match=r"1 \(Centred\)") as caught:
        check_samples(model, loss, (normal(4),))
    assert "GroupNorm" in str(caught.value)


def test_a_mixing_module_between_parameters_is_refused() -> None:
    with pytest.raises(Refused, match="sample"):
        check_samples(network(Centred()), loss, (normal(4),))


def test_mixing_that_only_training_mode_does_is_refused() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True) if self.training else x

    torch.manual_seed(0)
    model = nn.Sequential(Sometimes(), nn.Linear(4, 3)).double()
    with pytest.raises(Refused, match=r"0 \(Sometimes\)"):
        check_samples(model.train(), loss, (normal(4),))
    check_samples(model.eval(), loss, (normal(4),))


def token_losses(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    ids, targets = batch
    real = targets != 0
    return F.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none") * real, real


def test_a_loss_that_divides_by_the_batchs_tokens_is_refused_and_by_the_samples_own_passes() -> None:
    def coupled(model: nn.Module, batch: Any) -> Tensor:
        losses, real = token_losses(model, batch)
        return losses.sum(1) / real.sum()

    def alone(model: nn.Module, batch: Any) -> Tensor:
        losses, real = token_losses(model, batch)
        return losses.sum(1) / real.sum(1).clamp(min=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    targets = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0], [6, 7, 0, 0], [8, 0, 0, 0]])
    batch = (integers(9, 4), targets)
    check_samples(model, alone, batch)
    with pytest.raises(Refused, match="the loss"):
        check_samples(model, coupled, batch)


def test_a_loss_that_divides_by_the_batch_size_is_refused() -> None:
    """No sample's values couple it, but its gradient is not that of the sample on its own."""
    with pytest.raises(Refused, match="batch size"):
        check_samples(network(), lambda m, b: loss(m, b) / len(b[0]), (normal(4),))


def test_a_loss_that_subtracts_the_batchs_mean_is_refused() -> None:
    def relative(model: nn.Module, batch: Any) -> Tensor:
        values = loss(model, batch)
        return values - values.detach().mean()

    with pytest.raises(Refused, match="the loss mixes .* let it use no mean, count, rank"):
        check_samples(network(), relative, (normal(4),))


def test_what_needs_more_than_one_sample_is_told_that_a_step_may_draw_one_alone() -> None:
    """A squeeze takes the samples' dimension away too."""

    def squeezed(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(), batch[1], reduction="none")

    with pytest.raises(ValueError, match="Target size") as raised:
        check_samples(nn.Linear(6, 1), squeezed, (torch.randn(4, 6), torch.ones(4)))
    assert "write .squeeze(1) for .squeeze()" in raised.value.__notes__[0]


def test_attention_between_samples_is_refused() -> None:
    """A sequence-first attention that is given samples first attends to the other samples."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=False).double()
    with pytest.raises(Refused, match="sample"):
        check_samples(model, loss, (normal(5, 6),))


def test_a_gradient_that_a_custom_function_hides_is_refused() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return gradient * w, (gradient * x).sum(0)

    torch.manual_seed(0)
    model = Parts(lambda m, x: Product.apply(x, m.a.bias) + m.a(x), a=nn.Linear(4, 4)).double()
    with pytest.raises(Refused, match="differ from those computed one sample at a time"):
        check_samples(model, loss, (normal(4),))


@pytest.mark.parametrize("field", ["norms", "weighted_sum"])
def test_an_engine_that_is_off_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.Capture.__call__

    def wrong(capture: Any, batch: Any) -> Any:
        found = right(capture, batch)
        return 1.01 * found if field == "norms" else -1.0 * found

    monkeypatch.setattr(checks.Capture, "__call__", wrong)
    with pytest.raises(Refused, match="self-test failed: per-sample " + ("norms" if field == "norms" else "sums")):
        check_samples(network(), loss, (normal(4),))


# ── parameters that take no part ────────────────────────────────────────────────────────────────────────────────────


def test_parameters_that_receive_no_gradient_are_named() -> None:
    torch.manual_seed(0)
    model = Parts(lambda m, x: m.used(x), used=nn.Linear(4, 3), spare=nn.Linear(4, 2)).double()
    with pytest.raises(InputError, match=r"spare\.weight, spare\.bias.*requires_grad_\(False\)"):
        check_samples(model, loss, (normal(4),))
    model.spare.requires_grad_(False)
    check_samples(model, loss, (normal(4),))


def test_a_scripted_module_whose_inside_cannot_be_seen_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 3))).double()
    with pytest.raises(InputError, match=r"1\.weight"):
        check_samples(model, loss, (normal(4),))


# ── the model is left as it was ─────────────────────────────────────────────────────────────────────────────────────


def state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [name for m in model.modules() for name, value in vars(m).items() if "hook" in name and value]
    return [m.training for m in model.modules()], hooks, [p.requires_grad for p in model.parameters()]


def stateful() -> nn.Module:
    """Training flags that differ, statistics that every forward changes, and dropout."""
    torch.manual_seed(0)
    first = parametrizations.spectral_norm(nn.Linear(4, 6))
    model = nn.Sequential(first, nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().train()
    model[2].eval()
    return model


@pytest.mark.parametrize("ending", ["passes", "mixes", "wrong loss"])
def test_the_model_and_the_generators_are_restored_however_it_ends(ending: str) -> None:
    model, batch = stateful(), (normal(4),)
    flags, values = state(model), {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    run = {
        "passes": loss,
        "mixes": lambda m, b: loss(m, b) - loss(m, b).detach().mean(),
        "wrong loss": lambda m, b: loss(m, b).mean(),
    }[ending]
    if ending == "passes":
        check_samples(model, run, batch)
    else:
        with pytest.raises(InputError):
            check_samples(model, run, batch)
    assert state(model) == flags
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_batch_is_left_as_it_was() -> None:
    x = normal(4)
    before = x.clone()
    check_samples(network(), loss, (x,))
    assert torch.equal(x, before) and len(x) == SAMPLES


@pytest.mark.parametrize("name", ["resnet14_gn", "resnet14_enhanced", "gru"])
def test_a_model_that_computes_in_bfloat16_passes(name: str) -> None:
    from clipwise import models

    torch.manual_seed(0)
    words = name == "gru"
    model = models.build(name, (12,) if words else (1, 8, 8), 3, 50 if words else 0)
    x = torch.randint(0, 50, (4, 12)) if words else torch.rand(4, 1, 8, 8)

    def narrow(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    check_samples(model, narrow, (x, torch.tensor([0, 1, 2, 0])))
