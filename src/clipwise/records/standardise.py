"""Weight standardisation, as one call that whoever follows a model can recognise.

Receives: a weight [output, ...] and perhaps a gain [output].
Gives: standardise, the same weight with mean 0 and a fixed scale for each output, in either published form.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from clipwise.types import InputError, one_of

FORMS = ("std", "variance")


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
        rows = centred / (rows.std(1, keepdim=True) + 1e-6) / math.sqrt(fan_in)
    else:
        variance = rows.var(1, correction=0, keepdim=True)
        rows = centred * (variance * fan_in).clamp(min=1e-4).rsqrt()
    if gain is not None:
        rows = rows * gain[:, None]
    return rows.view_as(weight)
