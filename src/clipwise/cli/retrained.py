"""A finished run once more, for its audit: the same network, data, method, noise and steps.

Receives: the run's folder and settings, and the plan of its audit.
Gives: Retrained: an audit from one run with canaries in its data, and membership inference on the run's own model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from clipwise import methods
from clipwise.audit import AuditPlan, Roc, Verdict, coins, logistic_attack, shadow_attack, watched
from clipwise.audit.one_run import bound_of
from clipwise.audit.verdict import row
from clipwise.cli.parts import loss_of, network, optimizer_of, splits_for, use_threads
from clipwise.config import TrainConfig
from clipwise.data import Splits
from clipwise.private import Private
from clipwise.records import device_of, trainable
from clipwise.report.folder import MODEL, tensors_in
from clipwise.start import make_private


class Retrained:
    """The run's network, data, method, noise and steps once more."""

    def __init__(self, path: Path, settings: TrainConfig, method: str, plan: AuditPlan) -> None:
        self._path, self._settings, self._method, self._plan = path, settings, method, plan
        use_threads(settings)
        self._all = splits_for(settings)
        self._splits = network(settings, self._all).splits

    def _private(self, data: tuple[Tensor, ...]) -> Private:
        """The network before training, on other rows at the same sampling rate."""
        settings, plan = self._settings, self._plan
        start = network(settings, self._all)
        return make_private(
            start.model,
            optimizer_of(settings, trainable(start.model).values()),
            data,
            loss=loss_of(self._splits, settings.precision),
            method=self._method,
            noise_multiplier=plan.noise_multiplier,
            delta=plan.delta,
            steps=plan.steps,
            batch=max(1, round(plan.sampling_rate * len(data[0]))),
            chunk=settings.chunk,
            noise=plan.noise,
            accountant=settings.accountant,
            self_test=False,
            post=settings.post,
            public=start.public,
        )

    def one_run(self, canaries: int, confidence: float) -> Verdict:
        """The audit from one run: strange test rows with wrong labels are behind the run's own rows, by fair coins."""
        splits, plan = self._splits, self._plan
        inputs, labels = (t[:canaries] for t in splits.test.data)
        inputs, wrong = _shuffled(inputs), _wrong(labels, splits)
        included = coins(len(labels), plan.noise)
        private = self._private(
            tuple(torch.cat([own, new[included]]) for own, new in zip(splits.train.data, (inputs, wrong), strict=True))
        )
        device = device_of(private.model)
        total = watched(private, (inputs.to(device), wrong.to(device)), len(splits.train))
        bound = bound_of(total, included.numpy(), delta=plan.delta, confidence=confidence)
        detail = f"with {len(labels)} canaries, {len(labels) // 5} guesses"
        return row(methods.parse(self._method), "one run (retrained)", private.epsilon(), bound, detail)

    def membership(self, shadows: int, progress: Callable[[str], None]) -> dict[str, Roc]:
        """Attacks on the run's own model: its training rows are members, its test rows are not."""
        members, others = self._splits.train.data, self._splits.test.data
        model = network(self._settings, self._all).model
        model.load_state_dict(tensors_in(self._path / MODEL))
        found = {"logistic": logistic_attack(model, members, others)}
        if shadows:
            everybody = tuple(torch.cat(pair) for pair in zip(members, others, strict=True))
            trained = itertools.count(1)

            def train(rows: Tensor) -> nn.Module:
                progress(f"shadow {next(trained)} of {shadows}")
                private = self._private(tuple(t[rows] for t in everybody))
                for batch in private.batches():
                    private.step(batch)
                return private.model

            found["likelihood ratio"] = shadow_attack(model, train, members, others, shadows=shadows)
        return found


def _wrong(labels: Tensor, splits: Splits) -> Tensor:
    """Any class but a row's own; for a regression, a number that is far off."""
    if splits.task == "regression":
        return labels + 10 * labels.std().clamp(min=1e-6)
    return (labels + 1 + torch.arange(len(labels)) % (splits.classes - 1)) % splits.classes


def _shuffled(inputs: Tensor) -> Tensor:
    """Each row's entries in an order of their own: strange samples, with gradients of their own."""
    order = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0)).flatten(1).argsort(1)
    return inputs.flatten(1).gather(1, order).view_as(inputs)
