"""Weight standardisation, as one call that whoever follows a model can recognise.

Receives: a weight [output, ...] and perhaps a gain [output].
Gives: standardise, the same weight with mean 0 and a fixed scale for each output, in either published form; and
pulled_back, which takes gradients of the result back to weight and gain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from clipwise.types import InputError, one_of

FORMS = ("std", "variance")
TINY = 1e-30  # a variance below it is that of equal numbers, which have no direction to move along


def standardise(weight: Tensor, gain: Tensor | None = None, *, form: str) -> Tensor:
    """The weight, standardised for each output and multiplied by its gain.

    ``form="std"``: (w − mean)/(std + 1e-6)/√fan_in with the unbiased std (Xiao et al. 2023); ``form="variance"``:
    (w − mean)/√max(var·fan_in, 1e-4) with the biased variance (De et al. 2022).

    Guarantees: under a torch-function mode it is one call, ``standardise(weight, gain, form=...)``.
    Edge cases: fewer than two numbers for each output have no std, and are refused.
    """
    if has_torch_function((weight, gain)):
        made: Tensor = handle_torch_function(standardise, (weight, gain), weight, gain, form=form)
        return made
    one_of("form of standardisation", form, FORMS)
    rows = weight.flatten(1)
    fan_in = rows.shape[1]
    if fan_in < 2:
        raise InputError(
            f"a standardised weight needs at least 2 numbers for each output, got shape {list(weight.shape)}: "
            "write a plain layer instead"
        )
    centred = rows - rows.mean(1, keepdim=True)
    if form == "std":
        # not rows.std: a batch of its gradients is taken one by one
        deviation = rows.var(1, keepdim=True).clamp(min=TINY).sqrt()
        rows = centred / (deviation + 1e-6) / math.sqrt(fan_in)
    else:
        variance = rows.var(1, correction=0, keepdim=True)
        rows = centred * (variance * fan_in).clamp(min=1e-4).rsqrt()
    if gain is not None:
        rows = rows * gain[:, None]
    return rows.view_as(weight)


def pulled_back(
    gradients: Tensor, weight: Tensor, gain: Tensor | None = None, *, form: str
) -> tuple[Tensor, Tensor | None]:
    """Jᵀ V for gradients V [sample, *weight's shape] of the standardised weight, and those of the gain if there is one.

    With c = w − mean and W = γ f(w) c, where ∇f = s c:  v = γ f (V − mean V) + γ s ⟨V, c⟩ c, for each output.
    """
    w = weight.detach()
    dims, fan_in = tuple(range(1, w.dim())), w[0].numel()
    c = w - w.mean(dims, keepdim=True)
    squares = c.square().sum(dims, keepdim=True)
    if form == "std":
        deviation = (squares / (fan_in - 1)).clamp(min=TINY).sqrt()
        f = 1 / ((deviation + 1e-6) * math.sqrt(fan_in))
        s = torch.where(squares > (fan_in - 1) * TINY, -f / ((deviation + 1e-6) * (fan_in - 1) * deviation), 0.0)
    else:
        f = squares.clamp(min=1e-4).rsqrt()
        s = torch.where(squares >= 1e-4, -(f**3), 0.0)
    within = tuple(d + 1 for d in dims)
    along = (gradients * c).sum(within, keepdim=True)  # ⟨V, c⟩
    g = 1.0 if gain is None else gain.detach().reshape(-1, *(1,) * len(dims))
    back = torch.addcmul((gradients - gradients.mean(within, keepdim=True)) * (g * f), along * (g * s), c)
    return back, None if gain is None else (f * along).flatten(1)
