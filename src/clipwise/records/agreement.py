"""Whether two ways to compute the same gradients agree, as far as rounding lets them.

Receives: per-sample gradients, computed in two ways.
Gives: agree, or an error; tolerances, limits and most_apart, how far apart they may come out; moved_weights, joint and
in_half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clipwise.records.capture import trainable
from clipwise.records.gradients import SampleGradients
from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds import tensors_of
from clipwise.records.states import put_back
from clipwise.types import Refused

AGREES, HALF_AGREES = 1e-3, 5e-2  # how far apart two ways to compute norms, sums or losses may be, of their size
AT_MOST, HALF_AT_MOST = 5e-2, 0.3  # the same where the network itself blows rounding up
ROUNDING, HALF_ROUNDING = 1e-5, 2.0**-9  # of each weight: what fast float32 convolutions lose, and what bfloat16 does


def joint(gradients: SampleGradients, weights: Tensor) -> Tensor:
    """Σ_i w_i g_i of all parameters, one behind another."""
    summed = gradients.weighted_sum(weights)
    return torch.cat([summed[name].flatten() for name in gradients.names])


def tolerances(model: nn.Module, here: SampleGradients, again: Callable[[], SampleGradients]) -> tuple[float, float]:
    """How far apart two ways to compute the same norms may come out, and the same sums.

    Some networks blow rounding up (many of a ReLU's inputs are at its kink), so that no two ways agree closely. How
    much this one does is seen by moving its weights by as much as rounding would.
    """
    half = in_half(model, here)
    with moved_weights(model, half):
        there = again()
    weights = torch.ones(here.samples, device=here.norms().device)
    moved = ((here.norms(), there.norms()), (joint(here, weights), joint(there, weights)))
    norms, sums = (_apart(before.double(), after.double()) for before, after in moved)
    return limits(norms, half), limits(sums, half)


@contextmanager
def moved_weights(model: nn.Module, half: bool) -> Iterator[None]:
    """The model with weights that differ by as much as rounding would make them."""
    generator = torch.Generator("cpu").manual_seed(0)
    rounding = HALF_ROUNDING if half else ROUNDING
    with put_back(model, dict(model.named_parameters())):
        with torch.no_grad():
            for p in trainable(model).values():
                p.mul_(1 + rounding * torch.randn(p.shape, generator=generator, device="cpu").to(p))
        yield


def limits(moved: float, half: bool) -> float:
    """How far two ways to compute one thing may be apart, where moved weights moved it so far."""
    least = HALF_AGREES if half else AGREES
    return min(most_apart(half), max(least, 2 * moved)) if math.isfinite(moved) else least


def most_apart(half: bool) -> float:
    """How far they may be apart in any network."""
    return HALF_AT_MOST if half else AT_MOST


def _apart(before: Tensor, after: Tensor) -> float:
    """The length of the difference over that of the first; 0 where it is not a number."""
    apart = float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before).clamp(min=1e-12))
    return apart if math.isfinite(apart) else 0.0


def agree(what: str, fast: Tensor, slow: Tensor, tolerance: float, why: str) -> None:
    """Refuse what differs by more than this much of its size; ``why`` says what may be the cause."""
    finite = slow.isfinite()
    error = torch.linalg.vector_norm((fast.double() - slow.double())[finite])
    scale = torch.linalg.vector_norm(slow.double()[finite])
    if not bool(error <= tolerance * scale + 1e-12):
        raise Refused(
            f"the self-test failed: per-sample {what} differ from those computed one sample at a time by "
            f"{float(error / scale):.1e} of their size, expected at most {tolerance:.0e}; {why}"
        )


def in_half(model: nn.Module, gradients: SampleGradients) -> bool:
    """Whether something was computed in half precision, by its weights or by autocast.

    Edge cases: frozen layers have no record, but what trains on top of them receives their rounding.
    """
    every = (record for records in gradients.records.values() for record in records)
    recorded = (t.dtype for record in every for t in tensors_of(record).values())
    return any(dtype in HALF for dtype in itertools.chain(recorded, (p.dtype for p in model.parameters())))
