"""Clipped descent without noise: what clipping alone does. NOT PRIVATE: for analysis, never for a model to publish.

Receives: a model, a loss, data, a method and an optimizer.
Gives: descend, which moves the model by Σ w_i v_i/B; the sums of ``step.private_sum`` are used as they are, so that
there is no release, no ledger and no ε.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from clipwise.data import Arrays
from clipwise.methods import Engine, Method
from clipwise.passes import AT_START, Passes, PublicState
from clipwise.postprocess import Post, identity
from clipwise.randomness import SeededStream
from clipwise.records import Capture, Loss, trainable
from clipwise.records.states import Buffers
from clipwise.sampling import CHUNK, poisson
from clipwise.step import fed_back, private_sum, zeros
from clipwise.types import Gradient, InputError, whole

NOT_PRIVATE = "not private: trained without noise, for analysis only"
# (steps taken, the engine for these samples) → nothing; called after each step
AfterStep = Callable[[int, Callable[[Tensor], Engine]], None]


def descend(
    model: nn.Module,
    loss: Loss,
    data: Arrays,
    method: Method,
    optimizer: Optimizer,
    *,
    steps: int,
    batch: int,
    seed: int = 0,
    chunk: int = CHUNK,
    scheduler: LRScheduler | None = None,
    post: Post | None = None,
    keep: int = 0,
    after_step: AfterStep | None = None,
) -> tuple[Gradient, ...]:
    """Train without noise, on Poisson batches that follow the seed; gives the last ``keep`` iterates, oldest first.

    Guarantees: the same sums as a private step of this method, divided by the expected batch.
    Edge cases: methods that change from step to step (adaptive, schedule), draw from groups of samples (feedback that
    is forgotten in blocks or bounded), keep a momentum for each sample or need public companions are refused.
    """
    grouped = method.feedback is not None and method.feedback.memory in ("blocks", "bounded")
    if method.after is not None or method.recall is not None or method.companions or grouped:
        raise InputError(
            "a run without noise takes a method that is the same at every step and needs no public inputs, got "
            f"{method}"
        )
    if whole("batch", batch) > len(data):
        raise InputError(f"batch must be at most the {len(data)} samples of the data, got {batch}")
    post = identity() if post is None else post
    passes, stream = Passes(Capture(model, loss), data, float(batch), chunk), SeededStream(seed)
    state = AT_START
    iterates: tuple[Gradient, ...] = ()
    error: Gradient | None = None
    for step in range(whole("steps", steps)):
        parameters = trainable(model)
        drawn = stream.at(step)
        indices = poisson(len(data), batch / len(data), drawn)
        gradients = (found for _, found in passes.gradients(method, indices, drawn, state, Buffers(model)))
        private, _ = private_sum(method, parameters, gradients)
        total = {name: value for part in private.parts for name, value in part.value.items()}
        if method.feedback is not None and private.residual is not None:
            error = zeros(parameters) if error is None else error
            total, error = fed_back(method.feedback, total, error, private.residual, float(batch), False)
        here = {name: p.detach().clone() for name, p in parameters.items()}
        iterates = (*iterates, here)[-keep:] if keep else ()
        count = batch / method.unit
        mean = {name: value / count for name, value in total.items()}
        # no noise: its deviation is zero in every entry
        filtered, update = post.apply(state.post, mean, dict.fromkeys(mean, 0.0))
        state = PublicState((here, *state.past)[: method.past], mean, filtered)
        for name, parameter in parameters.items():
            parameter.grad = update[name].to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        if after_step is not None:
            after_step(step + 1, partial(passes.engine, seed=0, state=state))
    return iterates
