"""The columns of the bench: one training step as each library writes it.

Receives: a Case.
Gives: COLUMNS (name → builder); a builder makes a Step, and imports its library only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from clipwise.bench.cases import Case, losses


@dataclass(frozen=True)
class Step:
    """A training step on a fixed batch: call it to take one. ``model`` holds the parameters it trains."""

    model: nn.Module
    take: Callable[[], None]

    def __call__(self) -> None:
        """Take one step."""
        self.take()


def plain(case: Case) -> Step:
    """The ordinary eager step, without privacy: forward, backward of the mean loss, SGD."""
    model, (inputs, labels) = case.model(), case.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)

    def take() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return Step(model, take)


def clipwise_step(case: Case) -> Step:
    """This library: flat clipping, then SGD; noise from a seeded generator, as the peers draw theirs by default."""
    from clipwise.methods import flat
    from clipwise.noise import release
    from clipwise.randomness import SeededStream
    from clipwise.records import Capture, trainable
    from clipwise.step import private_sum
    from clipwise.types import PoissonGaussian

    model, batch = case.model(), case.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)
    capture, method, stream = Capture(model, losses), flat(case.clip_norm), SeededStream(0)
    event = PoissonGaussian(case.noise_multiplier, sampling_rate=0.01)

    def take() -> None:
        parameters = trainable(model)
        private, _ = private_sum(method, parameters, [capture(batch)])
        released = release(private, event, stream)
        for name, parameter in parameters.items():
            parameter.grad = (released.gradient[name] / case.batch).to(parameter.dtype)
        optimizer.step()

    return Step(model, take)


def vmap_step(case: Case) -> Step:
    """PyTorch's own way: per-sample gradients written out by ``vmap(grad)``, clipped, summed and noised."""
    model, (inputs, labels) = case.model(), case.data()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)

    def sample_loss(values: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (sample[None],)), label[None])

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
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return Step(model._module, take)


def opacus_ghost(case: Case) -> Step:
    """Opacus's ghost clipping: one backward for the norms, a second for the weighted sum."""
    opacus: Any = import_module("opacus")
    ghost: Any = import_module("opacus.utils.fast_gradient_clipping_utils")
    model = opacus.grad_sample.GradSampleModuleFastGradientClipping(_for_opacus(case), max_grad_norm=case.clip_norm)
    inputs, labels = case.data()
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=case.learning_rate),
        noise_multiplier=case.noise_multiplier,
        max_grad_norm=case.clip_norm,
        expected_batch_size=case.batch,
    )
    criterion = ghost.DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def take() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
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
    "vmap": vmap_step,
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
}
