"""The columns of the bench: one training step as each library writes it.

Receives: a Case.
Gives: COLUMNS and GPU_COLUMNS (name → builder), and ``builder``, which also knows a column for each method and LOOKS,
those of diagnostics; a builder makes a Step, and imports its library only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from clipwise.bench.cases import Case
from clipwise.types import InputError

if TYPE_CHECKING:
    from clipwise.private import Private


@dataclass(frozen=True)
class Step:
    """A training step on a fixed batch: call it to take one. ``model`` holds the parameters it trains."""

    model: nn.Module
    take: Callable[[], None]
    warm_up: int = 2  # steps after which each one is like the next

    def __call__(self) -> None:
        """Take one step."""
        self.take()


def plain(case: Case) -> Step:
    """The ordinary eager step, without privacy: forward, backward of the mean loss, SGD."""
    model, (inputs, labels) = case.model(), case.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)

    def take() -> None:
        optimizer.zero_grad()
        case.losses(model, (inputs, labels)).mean().backward()
        optimizer.step()

    return Step(model, take)


def compiled(case: Case, *, graph: bool = False, channels_last: bool = False) -> Step:
    """The ordinary step compiled; with ``graph`` replayed as one CUDA graph, optimizer and all.

    ``channels_last``: in memory, for images.
    """
    if channels_last and case.vocabulary:
        raise InputError(f"only images have channels: {case.title} has tokens")
    model, batch = _laid_out(case, channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)
    loss = torch.compile(lambda batch: case.losses(model, batch).mean())

    def take() -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    return Step(model, _recorded(take) if graph else take)


def _laid_out(case: Case, last: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model, (inputs, labels) = case.model(), case.data()
    if last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs
    return model, (inputs, labels)


def _recorded(take: Callable[[], None]) -> Callable[[], None]:
    """The same step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            take()
    torch.cuda.current_stream().wait_stream(side)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        take()

    # the graph reads the batch and the model where they lie, and keeps neither: the default holds on to both
    def replay(reads: Callable[[], None] = take) -> None:
        recording.replay()

    return replay


def clipwise_step(case: Case, *, compiled: bool = False, noise: bool = True) -> Step:
    """This library: flat clipping, then SGD; noise from a seeded generator, as the peers draw theirs by default.

    ``compiled``: through compiled graphs, channels last for images; without ``noise`` it trains on the private sum.
    """
    from clipwise.methods import flat
    from clipwise.noise import release
    from clipwise.randomness import SeededStream
    from clipwise.records import Capture, trainable
    from clipwise.records.compiled import CompiledCapture
    from clipwise.step import private_sum
    from clipwise.types import PoissonGaussian

    model, batch = _laid_out(case, compiled and case.shape[0] > 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)
    parameters, method, stream = trainable(model), flat(case.clip_norm), SeededStream(0)
    groups = [block.names for block in method.blocks(tuple(parameters))]
    # a recurrent layer is hundreds of steps: recorded as it is, since a compiler would take many minutes
    options = {"backend": "eager"} if any(isinstance(m, nn.RNNBase) for m in model.modules()) else {}
    capture: Any = (
        CompiledCapture(model, case.losses, case.batch, groups, options) if compiled else Capture(model, case.losses)
    )
    event = PoissonGaussian(case.noise_multiplier, sampling_rate=0.01)

    def take() -> None:
        optimizer.zero_grad()  # as in the ordinary step: the last gradients need not be there beside the next
        private, _ = private_sum(method, parameters, [capture(batch)], alone=True)
        if noise:
            update = release(private, event, stream, case.batch, torch.float32).gradient
        else:
            update = {name: value / case.batch for part in private.parts for name, value in part.value.items()}
        for name, parameter in parameters.items():
            parameter.grad = update[name]
        optimizer.step()

    return Step(model, take)


def method_step(case: Case, *, method: str) -> Step:
    """This library with any method, as ``make_private`` runs it: every sample of the batch drawn at every step.

    With its own reading of the data: to be compared with another method, not with other columns.
    """
    private = _private(case, method)
    batches = private.batches()
    # the first steps have fewer earlier iterates to look at
    return Step(private.model, lambda: private.step(next(batches)), warm_up=max(2, private.method.past))


def look_step(case: Case, *, methods: Sequence[str]) -> Step:
    """Not a step but a look at the gradients of the whole batch through these methods, the run's own first."""
    from clipwise.diagnostics import Monitor
    from clipwise.methods import parse

    own, *beside = methods
    private = _private(case, own)
    samples = torch.arange(case.batch)
    monitor = Monitor(private.rows(samples), "private", tuple(parse(method) for method in beside))

    def take() -> None:
        monitor.look(
            private.engine(samples, 0),
            private.method,
            step=private.steps_taken,
            noise_multiplier=private.noise_multiplier,
            expected_batch=private.expected_batch,
        )

    return Step(private.model, take)


def _private(case: Case, method: str) -> Private:
    from clipwise.start import make_private

    model, data = _laid_out(case, case.compile)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)
    return make_private(
        model,
        optimizer,
        data,
        loss=case.losses,
        method=method,
        noise_multiplier=case.noise_multiplier,
        steps=1_000_000,
        batch=case.batch,
        chunk=case.batch,
        compile=case.compile,
        delta=1e-9,
        noise=0,
        self_test=False,  # it is for models of unknown origin
    )


def vmap_step(case: Case) -> Step:
    """PyTorch's own way: per-sample gradients written out by ``vmap(grad)``, clipped, summed and noised."""
    model, (inputs, labels) = case.model(), case.data()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)

    def sample_loss(values: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        called = lambda inputs: functional_call(model, values, (inputs,))
        return case.losses(called, (sample[None], label[None])).sum()  # type: ignore[arg-type]

    # only dropout would draw random numbers, and no case has any
    per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))

    def take() -> None:
        gradients = per_sample({name: value.detach() for name, value in parameters.items()}, inputs, labels)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)  # [sample]
        weights = (case.clip_norm / norms).clamp(max=1)
        scale = case.noise_multiplier * case.clip_norm
        for name, parameter in parameters.items():
            total = torch.tensordot(weights, gradients[name], dims=1)
            parameter.grad = (total + scale * torch.randn_like(total)) / case.batch
        optimizer.step()

    return Step(model, take)


def opacus_hooks(case: Case) -> Step:
    """Opacus's default: hooks write the per-sample gradients out, its optimizer clips, sums and noises them."""
    opacus: Any = import_module("opacus")
    model, (inputs, labels) = opacus.GradSampleModule(_for_opacus(case)), case.data()
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=case.learning_rate),
        noise_multiplier=case.noise_multiplier,
        max_grad_norm=case.clip_norm,
        expected_batch_size=case.batch,
    )

    def take() -> None:
        optimizer.zero_grad()
        case.losses(model, (inputs, labels)).mean().backward()
        optimizer.step()

    return Step(model._module, take)


def opacus_ghost(case: Case) -> Step:
    """Opacus's ghost clipping: one backward for the norms, a second for the weighted sum."""
    opacus: Any = import_module("opacus")
    ghost: Any = import_module("opacus.utils.fast_gradient_clipping_utils")
    model = opacus.grad_sample.GradSampleModuleFastGradientClipping(_for_opacus(case), max_grad_norm=case.clip_norm)
    inputs, labels = case.data()
    if case.next_token:
        raise InputError("its criterion takes one label per sample")
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=case.learning_rate),
        noise_multiplier=case.noise_multiplier,
        max_grad_norm=case.clip_norm,
        expected_batch_size=case.batch,
    )
    criterion = ghost.DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def take() -> None:
        optimizer.zero_grad()
        with case.precision():
            loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()

    return Step(model._module, take)


def _for_opacus(case: Case) -> nn.Module:
    """The case's model with the layers that Opacus cannot hook swapped for its own, weights kept.

    *Edge cases*: up to Opacus 1.6, DPMultiheadAttention with batch_first and several heads puts the heads together in
    another order than PyTorch does (its pull request 825): it computes another function, at the same cost.
    """
    validators: Any = import_module("opacus.validators")
    fixed: nn.Module = validators.ModuleValidator.fix(case.model())
    return fixed


COLUMNS: dict[str, Callable[[Case], Step]] = {
    "plain": plain,
    "clipwise": clipwise_step,
    "without_noise": partial(clipwise_step, noise=False),
    "vmap": vmap_step,
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
}
ORDINARY = ("plain", "compiled", "graph", "channels_last")
GPU_COLUMNS: dict[str, Callable[[Case], Step]] = {
    "plain": plain,
    "compiled": compiled,
    "graph": partial(compiled, graph=True),
    "channels_last": partial(compiled, graph=True, channels_last=True),
    "clipwise": partial(clipwise_step, compiled=True),
    "without_noise": partial(clipwise_step, compiled=True, noise=False),
    "clipwise_eager": clipwise_step,
    "vmap": vmap_step,
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
}
ON_REQUEST = ("without_noise", "clipwise_eager")  # parts of the step, measured only where they are named
METHOD = "method "  # how a column of this library's own method begins, such as "method psac"
LOOK = "look, "  # how a column of diagnostics begins
LOOKS = {
    LOOK + "own method": ("flat",),
    LOOK + "five methods": ("flat", "normalised", "automatic", "psac", "global_"),
}


def builder(column: str, table: Mapping[str, Callable[[Case], Step]]) -> Callable[[Case], Step]:
    """What makes a column's step: the table's own builder, any method's, or a look's."""
    if column.startswith(METHOD):
        return partial(method_step, method=column.removeprefix(METHOD))
    return partial(look_step, methods=LOOKS[column]) if column in LOOKS else table[column]
