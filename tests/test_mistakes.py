"""What users write by mistake in Python: each is answered by what was got and what to write, before any release."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import clipwise as cw
from clipwise import elsewhere, report
from clipwise.cli.parts import spent_before
from clipwise.methods import METHODS, Method, parse
from clipwise.methods.method import Count
from clipwise.refusals import check_weights
from clipwise.types import InputError, Refused
from made import Made

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3
PLAN: dict[str, Any] = {"noise_multiplier": 1.0, "steps": 3, "batch": 8, "noise": 1, "delta": 1e-3}


def begun(model: nn.Module | None = None, data: Any = (X, Y), **changed: Any) -> cw.Private:
    """A run that is made and takes no step; of a linear model, unless another is given."""
    model = nn.Linear(4, 3) if model is None else model
    return cw.make_private(model, torch.optim.SGD(model.parameters()), data, **{**PLAN, **changed})


def fitted(**changed: Any) -> cw.Run:
    """A whole run of such a model."""
    return cw.train(nn.Linear(4, 3), cw.cross_entropy, (X, Y), **{**PLAN, **changed})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot make a step of one noisy gradient: it computes losses again"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam cannot make a step .* takes sparse ones; write for instance"),
        (lambda p: None, "expected one optimizer of torch's, got NoneType: write torch.optim.SGD"),
        (list, "expected one optimizer of torch's, got list"),
    ],
)
def test_an_optimizer_that_cannot_make_private_steps_is_said_before_anything_is_spent(
    optimizer: Any, message: str
) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(InputError, match=message):
        cw.make_private(model, optimizer(model.parameters()), (X, Y), **PLAN)


@pytest.mark.parametrize("real", [True, False])
def test_a_complex_parameter_is_told_how_to_be_real_which_works(real: bool) -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = torch.randn(X.shape[1] // 2 + 1, dtype=torch.complex64)
            self.gain = nn.Parameter(torch.view_as_real(start).clone() if real else start)
            self.last = nn.Linear(X.shape[1], 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gain = torch.view_as_complex(self.gain) if real else self.gain
            return self.last(torch.fft.irfft(torch.fft.rfft(x) * gain, n=X.shape[1]))

    if not real:
        with pytest.raises(
            InputError, match=r"gain must be real, .* write torch.view_as_complex\(…\) of it in forward"
        ):
            begun(Spectrum())
        return
    private = begun(Spectrum())
    for batch in private.batches():
        private.step(batch)


@pytest.mark.parametrize(
    ("option", "write"),
    [
        ("max_grad_norm", r"write method=clipwise\.flat\(1\.0\)"),
        ("data_loader", r"write data=loader\.dataset"),
        ("target_delta", "write delta"),
        ("batch_size", "did you mean 'batch'"),
        ("module", "did you mean 'model'"),
        ("gradient_accumulation_steps", "write nothing for it: batch is the whole step's"),
        ("shuffle", "write nothing for it: every batch is a Poisson draw"),
        ("precision", r"write nothing for it: use torch\.autocast within the loss"),
        ("learning_rate", r"write optimizer=lambda parameters: torch\.optim\."),
        ("eval_dataset", "write nothing for it: data is what is trained on, and evaluate"),
        ("class_weights", "write the weights into a loss"),
    ],
)
def test_the_options_of_other_libraries_are_answered_by_what_to_write(option: str, write: str) -> None:
    for name, make in (("make_private", begun), ("train", fitted)):
        with pytest.raises(TypeError, match=f"{name} has no option '{option}': {write}"):
            make(**{option: 1})


def test_what_runs_are_asked_elsewhere_is_answered_by_what_to_write() -> None:
    private = begun()
    for name, write in elsewhere.PRIVATE.items():
        with pytest.raises(AttributeError) as told:
            getattr(private, name)
        assert str(told.value) == f"a private run has no attribute {name!r}: write {write}"
    with pytest.raises(AttributeError, match="a private run has no attribute 'nonsense'$"):
        private.nonsense  # noqa: B018
    with pytest.raises(TypeError, match=r"write private = clipwise\.make_private"):
        _, _, _ = private
    run = fitted()
    for name in elsewhere.RUN:
        with pytest.raises(AttributeError, match=f"a finished run has no attribute '{name}': write "):
            getattr(run, name)


def test_no_name_that_is_answered_is_one_that_works() -> None:
    options = {*inspect.signature(cw.make_private).parameters, *inspect.signature(cw.train).parameters}
    assert not options & elsewhere.OPTIONS.keys()
    assert not set(cw.__all__) & elsewhere.NAMES.keys()
    assert "write clipwise.make_private(" in str(elsewhere.lacking("module", "PrivacyEngine", elsewhere.NAMES))
    assert "clipwise predict --help" in str(elsewhere.lacking("module", "predict", elsewhere.NAMES))


def test_opacus_engine_is_answered_by_what_to_write() -> None:
    with pytest.raises(AttributeError, match=r"'PrivacyEngine': write clipwise\.make_private\("):
        cw.PrivacyEngine  # noqa: B018
    with pytest.raises(AttributeError, match=r"'make_private_with_epsilon': write clipwise\.make_private\("):
        cw.make_private_with_epsilon  # noqa: B018


def test_mixup_is_not_answered_by_another_normalisation() -> None:
    def mixed(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return cw.cross_entropy(model, (0.7 * x + 0.3 * x.flip(0), y))

    with pytest.raises(InputError, match=r"before the model \(Linear\) mixes .* leave it out there \(mixup"):
        begun(loss=mixed)


def test_arguments_in_the_wrong_places_are_named() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(InputError, match=r"expected a model first, an nn\.Module, got tuple"):
        cw.make_private((X, Y), model, model, **PLAN)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="make_private has no option 'target_epsilon'.*'epsilon'"):
        begun(target_epsilon=3)
    with pytest.raises(InputError, match=r"such as torch\.optim\.Adam, got 'adam'"):
        fitted(optimizer="adam")
    with pytest.raises(InputError, match="ReduceLROnPlateau; write a loop of your own"):
        fitted(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(InputError, match=r"evaluate must give numbers by name, such as .*, got 0\.5"):
        fitted(evaluate=lambda m: 0.5)
    for given, said in ((1, "1"), (torch.optim.lr_scheduler.StepLR, r"StepLR \(.*step_size")):
        with pytest.raises(InputError, match=f"scheduler must be one .* of an optimizer alone, got {said}"):
            fitted(scheduler=given)
    with pytest.raises(TypeError, match="train has no option 'schedule': did you mean 'scheduler'"):
        fitted(schedule=None)
    with pytest.raises(InputError, match=r"weight has no shape yet: send one batch through the model"):
        begun(nn.LazyLinear(3))


def test_a_model_of_another_width_is_told_what_it_was_given() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        begun(nn.Linear(7, 3))
    said = f"clipwise gave the loss and the model the first two samples, tensors of [2, {X.shape[1]}], [2]"
    assert caught.value.__notes__ == [said]


def test_inference_mode_is_refused_at_the_start_and_at_a_step() -> None:
    message = r"none of under torch\.inference_mode\(\): make the run and its steps outside"
    model = nn.Linear(4, 3)
    with torch.inference_mode(), pytest.raises(InputError, match=message):
        begun(model)
    with torch.inference_mode():
        made = nn.Linear(4, 3)
    with pytest.raises(InputError, match=r"weight was made under torch\.inference_mode\(\)"):
        begun(made)
    private = begun(model)
    batch = next(private.batches())
    with torch.inference_mode(), pytest.raises(InputError, match=message):
        private.step(batch)
    assert private.ledger.releases == 0
    private.step(batch)  # the same draw: a refusal chooses none


class _WithoutDouble(TorchFunctionMode):
    """What is in float32 lies on a device that has no float64, as Apple's GPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **kwargs or {})
        if getattr(given, "dtype", None) == torch.double and getattr(args[0], "dtype", None) == torch.float32:
            raise TypeError("the framework doesn't support float64")
        return given


def test_a_device_without_float64_is_refused_before_anything_is_computed() -> None:
    said = r"in float64, and the device cpu.* has none .* write model.to"
    with _WithoutDouble(), pytest.raises(InputError, match=said):
        begun()


@pytest.mark.parametrize("given", [[1.0, 2.0], X.numpy()])
def test_public_inputs_that_are_no_tensor_are_named(given: Any) -> None:
    with pytest.raises(InputError, match=r"public must be a tensor of inputs, got \w+: write torch\.as_tensor"):
        begun(public=given)


def test_views_that_are_no_function_are_named() -> None:
    with pytest.raises(InputError, match="views must be a function of a row, a count and a generator, got int"):
        begun(views=3)


def test_a_run_prints_how_far_it_is() -> None:
    private = begun(method=cw.psac())
    private.step(next(private.batches()))
    assert repr(private) == (
        "<private training of Linear by psac(clip_norm=1.0, r=0.1): 1 of 3 steps made, expected batch 8 of 40 samples>"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y + 1), "write y - 1 where they begin with 1"),
        ((X, Y.float()), r"write y\.long\(\), or for numbers to predict loss=clipwise\.squared_error"),
        ({"x": X, "y": Y}, r"takes batches \(inputs, labels\), got dict: write a loss\(model, batch\) of your own"),
        ((X, Y, Y), "got 3 parts"),
        ((X, Y[:, None]), r"one label per sample, got shape \[2, 1\]: write y\.squeeze\(1\)"),
        ((X, nn.functional.one_hot(Y)), r"one label per sample, got shape \[2, 3\]: write y\.argmax\(1\)"),
    ],
)
def test_data_that_the_usual_loss_cannot_take_is_named(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        begun(data=data, batch=3)


def test_labels_of_any_whole_numbers_are_labels() -> None:
    model = nn.Linear(4, 3)
    expected = cw.cross_entropy(model, (X, Y))
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(cw.cross_entropy(model, (X, Y.to(dtype))), expected)


@pytest.mark.parametrize(
    ("outputs", "y", "write"),
    [(1, X[:, :1], r"y\.squeeze\(1\)"), (3, X[:, 0], r"a loss\(model, batch\)"), (1, X[:, :2], r"a loss\(model")],
)
def test_shapes_that_would_broadcast_in_a_squared_error_are_named(outputs: int, y: torch.Tensor, write: str) -> None:
    with pytest.raises(InputError, match=f"squared_error takes one output and one number per sample.*write {write}"):
        begun(nn.Linear(4, outputs), (X, y), loss=cw.squared_error)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (nn.functional.cross_entropy, "cross_entropy"),
        (lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="none"), "<lambda>"),
        (nn.CrossEntropyLoss(reduction="none"), "CrossEntropyLoss"),
    ],
)
def test_a_criterion_is_no_loss_of_a_model_and_a_batch(loss: Any, got: str) -> None:
    with pytest.raises(InputError, match=rf"function loss\(model, batch\).*got {got}; write"):
        begun(loss=loss)


def test_a_loss_that_torch_compiled_is_named() -> None:
    with pytest.raises(InputError, match="expected the loss itself, got what torch.compile made of it"):
        begun(loss=torch.compile(cw.cross_entropy))


@pytest.mark.parametrize("name", ["ledger", "spent"])
def test_a_path_is_no_ledger(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} must be a ledger, got 'x\.jsonl': write {name}=clipwise\.Ledger"):
        begun(**{name: "x.jsonl"})


def test_what_was_spent_stands_in_a_file_that_is_there(tmp_path: Path) -> None:
    """A misspelt path would count as nothing spent; a run's own ledger begins in a new file."""
    model, path = nn.Linear(4, 3), tmp_path / "ledger.jsonl"
    with pytest.raises(
        InputError, match=r"the file .*ledger\.jsonl is not there: write the ledger\.jsonl of the earlier run"
    ):
        begun(model, spent=cw.Ledger(path))
    path.touch()  # all that it held may be lost
    with pytest.raises(InputError, match=r"ledger\.jsonl holds nothing: write"):
        begun(model, spent=cw.Ledger(path))
    with pytest.raises(InputError, match="holds no release, so what was spent is lost"):
        spent_before([str(tmp_path)])
    earlier = begun(model, ledger=cw.Ledger(path))
    earlier.step(next(earlier.batches()))
    private = begun(model, spent=cw.Ledger(path))
    assert private.epsilon() == earlier.epsilon() > 0


def test_what_is_no_model_or_monitor_is_named_before_anything_is_begun() -> None:
    with pytest.raises(InputError, match=r"expected a model first, .* got function: write train\(model, loss, data"):
        cw.train(cw.cross_entropy, nn.Linear(4, 3), (X, Y), **PLAN)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"monitor must be a Monitor, got True: write monitor=clipwise\.Monitor"):
        fitted(monitor=True)


@pytest.mark.parametrize("found", [None, {"a": "b"}, {"a": torch.ones(3)}, {"a": None}])
def test_what_is_no_number_is_not_measured(found: Any) -> None:
    with pytest.raises(InputError, match="evaluate must give numbers by name"):
        fitted(evaluate=lambda m: found)


def test_evaluate_is_asked_for_and_cannot_state_another_epsilon() -> None:
    with pytest.raises(InputError, match="evaluate must be a function of the model, got 5"):
        fitted(evaluate=5)
    run = fitted(evaluate=lambda m: {"epsilon": 0.1, "a": 1})
    assert run.metrics[-1] == {"step": 3, "epsilon": run.epsilon, "a": 1}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] * w, (gradients[0] * x).sum(0)


class OfOnesOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.w = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.layer(x), self.w)  # type: ignore[no-any-return,no-untyped-call]


def test_what_is_wrong_with_a_loss_or_a_model_is_said_as_it_is() -> None:
    with pytest.raises(InputError, match="the gradients of w cannot be followed: an autograd function of your own"):
        begun(OfOnesOwn())
    with pytest.raises(InputError, match="the loss has no gradient at all"):
        begun(loss=lambda m, b: cw.cross_entropy(m, b).detach())
    with pytest.raises(InputError, match=r"got shape \[2, 3\]; write values\.flatten\(1\)\.mean\(1\)"):
        begun(loss=lambda m, b: m(b[0]).square())
    with pytest.raises(
        InputError, match=r"\[2, 2\]; write model\(x\)\.squeeze\(1\) where \[2, 1\] met \[2\], otherwise"
    ):
        begun(nn.Linear(4, 1), (X, Y.float()), loss=lambda m, b: (m(b[0]) - b[1]).square())
    with pytest.raises(Refused, match=r"the loss mixes the samples.*\[n, 1\] and \[n\] make \[n, n\]"):
        begun(nn.Linear(4, 1), (X, Y.float()), loss=lambda m, b: (m(b[0]) - b[1]).square().mean(1))
    with pytest.raises(InputError, match="call each layer once for the whole batch"):
        begun(loss=lambda m, b: cw.cross_entropy(lambda x: torch.stack([m(row) for row in x]), b))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no loss of 4 samples is a finite number"):
        begun(loss=lambda m, b: cw.cross_entropy(m, b) * float("nan"))


def test_a_model_that_diverged_is_warned_of_once() -> None:
    model = nn.Linear(4, 3)
    private = begun(model)
    batches = private.batches()
    private.step(next(batches))
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="in step 2 no sample had a finite gradient, so that noise alone was added"):
        private.step(next(batches))
    with warnings.catch_warnings(action="error"):
        private.step(next(batches))


def test_samples_that_are_lost_are_warned_of_where_they_are_most() -> None:
    holes = Made(40, lambda i: (X[i] * (1 if i < 4 else float("nan")), Y[i]))
    private = begun(data=holes, batch=40, self_test=False)
    with pytest.warns(UserWarning, match="in step 1 36 of 40 samples had no finite gradient and added nothing") as said:
        private.step(next(private.batches()))
    assert said[0].filename == __file__  # the user's own line


def test_a_module_that_was_exchanged_is_not_taken_for_a_gradient_without_noise() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    private = begun(model)
    model[1] = nn.Linear(5, 3)
    with pytest.raises(InputError, match="1.weight is not in the optimizer.*was a module exchanged"):
        private.step(next(private.batches()))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(lambda h: self.middle(h).relu(), self.first(x), use_reentrant=self.reentrant))


def test_a_penalty_on_a_gradient_is_told_to_be_differences_which_pass() -> None:
    # it was said to mix samples; its second derivatives by the weights are what is missing from the records
    def penalty(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1) + cw.cross_entropy(model, batch)

    def differences(model: nn.Module, batch: Any) -> torch.Tensor:
        x, _ = batch
        return ((model(x + 0.1) - model(x)) / 0.1).square().sum(1) + cw.cross_entropy(model, batch)

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    step = torch.optim.SGD(model.parameters())
    with pytest.raises(Refused, match="in the place of create_graph=True write differences"):
        cw.make_private(model, step, (X, Y), loss=penalty, **PLAN)
    cw.make_private(model, step, (X, Y), loss=differences, **PLAN)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_named(reentrant: bool) -> None:
    with pytest.raises(InputError, match=r"gradient checkpointing.*turn it off.*smaller chunk"):
        begun(Checkpointed(reentrant))


def own(weigh: Any) -> Method:
    return Method("mine", cw.flat().citation, {}, weigh=weigh, bound=1.0)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda n: 1 / torch.maximum(n, n.mean()),
        lambda n: torch.where(n <= n.median(), 1 / n, 0.0),
        lambda n: torch.where(n >= n.topk(min(64, len(n))).values[-1], 1 / n, 0.0),  # of few, all
        lambda n: torch.rand_like(n) / n,
    ],
)
def test_weights_that_follow_other_samples_are_refused(weigh: Any) -> None:
    for method in (own(weigh), cw.inner_momentum(own(weigh)), cw.schedule([(0, cw.flat()), (2, own(weigh))])):
        with pytest.raises(Refused, match="depend on other samples' norms too"):
            begun(method=method)
    private = begun()
    for method in (own(weigh), cw.schedule([(0, cw.flat()), (2, own(weigh))])):
        with pytest.raises(Refused, match="depend on other samples' norms too"):
            private.method = method


def test_a_weight_that_will_be_cut_is_warned_of_since_another_formula_is_trained() -> None:
    for method in (own(lambda n: 1 / (1 + n.sqrt())), cw.inner_momentum(own(lambda n: 1 / (1 + n.sqrt())))):
        said = r"does not keep its bound of 1: a gradient of norm .* cut to bound/norm"
        with pytest.warns(UserWarning, match=said) as seen:
            begun().method = method
        with pytest.warns(UserWarning, match=said) as again:
            begun(method=method)
        assert [w.filename for w in (*seen, *again)] == [__file__] * 2  # the user's own line
    with pytest.raises(InputError, match="bound must be a number above 0, got '1'"):
        begun(method=dataclasses.replace(cw.flat(), bound="1"))  # type: ignore[arg-type]
    parameters = dict(nn.Linear(4, 3).named_parameters())
    with warnings.catch_warnings(action="error"):
        for method in (own(lambda n: 1 / (1 + n)), *(parse(name) for name in METHODS)):
            check_weights(method, parameters)


def test_counts_that_follow_other_samples_are_refused() -> None:
    """With this one a sample moved the count by three bounds."""
    method = dataclasses.replace(cw.flat(), count=Count(lambda n: (n > n.mean()).float() - 0.5, 0.5))
    with pytest.raises(Refused, match="the counts of flat depend on other samples' norms too"):
        begun(method=method)


def test_a_method_of_one_s_own_trains_and_its_run_is_no_page_until_it_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smooth = own(lambda n: 1 / (1 + n * n).sqrt())
    run = fitted(method=smooth, folder=tmp_path / "run")
    assert "method       mine()" in run.statement.text()
    with pytest.raises(
        InputError,
        match=r"whose method mine\(\) is not clipwise's own: in a program .*clipwise\.METHODS\[name\] = its function",
    ):
        report.read([tmp_path / "run"])
    monkeypatch.setitem(cw.METHODS, "mine", lambda: smooth)
    assert report.read([tmp_path / "run"])[0].method is smooth
    with pytest.raises(InputError, match=r"mine must give weights \[n\] for norms \[n\], got float"):
        fitted(method=own(lambda n: 0.1))


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda state, g, noise: g, r"mine\(\) must give \(state, gradient\), got dict"),
        (lambda state, g, noise: (state, {"weight": g["weight"]}), r"an update of bias of its shape \(3,\), got None"),
    ],
)
def test_a_filter_that_gives_something_else_is_told_what_to_give(apply: Any, message: str) -> None:
    private = begun(post=cw.postprocess.Post("mine()", apply))
    with pytest.raises(InputError, match=message):
        private.step(next(private.batches()))


def test_a_method_in_a_message_is_the_expression_that_makes_it() -> None:
    assert repr(cw.layerwise(cw.psac())) == str(cw.layerwise(cw.psac()))
    with pytest.raises(InputError, match=r"phases must be pairs .*, got \(flat\(clip_norm=1\.0\), flat"):
        cw.schedule((cw.flat(), cw.flat()))  # type: ignore[arg-type]
