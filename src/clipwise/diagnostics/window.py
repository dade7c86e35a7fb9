"""Window independence: how much of a sample's sampling noise cancels over several iterates (paper 0, Fig. 5a).

Receives: the per-sample gradients of the same samples at successive iterates.
Gives: Independence, the averaged noise for every window length beside what independent noise would give; not private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clipwise.diagnostics.bias import NOT_PRIVATE
from clipwise.diagnostics.finite import finite_part
from clipwise.records import SampleGradients
from clipwise.types import InputError


@dataclass(frozen=True)
class Window:
    """The noise ξ_l = g_l − ĝ_l of single samples, averaged over windows of ``length`` iterates. Not private."""

    length: int  # K0
    noise: float  # mean of ‖(1/K0) Σ_{l in window} ξ_l‖ over samples and windows
    independent: float  # the same if ⟨ξ_l, ξ_l'⟩ were 0: mean of √(Σ ‖ξ_l‖²)/K0


@dataclass(frozen=True)
class Independence:
    """How nearly independent sampling noise is over iterates: what inner momentum could cancel. Not private."""

    samples: int
    windows: tuple[Window, ...]  # of 1, 2, … iterates
    cosines: tuple[float, ...]  # mean cosine of ξ_l and ξ_{l+k} for lags k = 1, 2, …
    note: str = NOT_PRIVATE
    not_private: Literal[True] = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def independence(iterates: Sequence[SampleGradients]) -> Independence:
    """The measurement of paper 0, Fig. 5a, for gradients of the same samples at iterates θ_1 … θ_T, oldest first.

    Guarantees: needs each iterate's gradients and their pairwise sums only, T (T + 1)/2 norms, for all windows.
    Edge cases: samples whose gradient is not finite at some iterate are left out; a noise of zero has cosine 0.
    """
    if not iterates or len({each.samples for each in iterates}) != 1:
        sizes = [each.samples for each in iterates]
        raise InputError(f"expected the same samples at every iterate, got gradients of {sizes} samples")
    gram = _noise_products(iterates)  # ⟨ξ_l, ξ_l'⟩, [iterate, iterate, sample]
    total = len(iterates)
    lengths = torch.stack([gram[i, i] for i in range(total)]).clamp(min=0).sqrt()
    windows = []
    for length in range(1, total + 1):
        spans = [slice(start, start + length) for start in range(total - length + 1)]
        noise = torch.stack([gram[span, span].sum((0, 1)).clamp(min=0).sqrt() for span in spans])
        apart = torch.stack([lengths[span].square().sum(0).sqrt() for span in spans])
        windows.append(Window(length, float(noise.mean()) / length, float(apart.mean()) / length))
    cosines = []
    for lag in range(1, total):
        product = torch.stack([gram[i, i + lag] for i in range(total - lag)])
        norms = lengths[:-lag] * lengths[lag:]
        cosines.append(float(torch.where(norms > 0, product / norms, 0.0).mean()))
    return Independence(gram.shape[2], tuple(windows), tuple(cosines))


def _noise_products(iterates: Sequence[SampleGradients]) -> Tensor:
    """⟨g_l − ĝ_l, g_l' − ĝ_l'⟩ of each sample from norms of sums: ⟨u, v⟩ = (‖u + v‖² − ‖u‖² − ‖v‖²)/2."""
    looked = [finite_part(each) for each in iterates]
    finite = torch.stack([each.finite for each in looked]).all(0)
    if not bool(finite.any()):
        raise InputError("expected samples whose gradients are finite at every iterate, got none")
    own = list(iterates) if bool(finite.all()) else [each.masked(finite) for each in iterates]
    means = [each.weighted_sum(finite.double() / finite.sum()) for each in own]
    squares = [each.squares.sum(1) for each in looked]
    # ⟨g_l, ĝ_m⟩, [l][m]
    along = [[each.inner(mean).double() for mean in means] for each in own]
    rows: list[list[Tensor]] = []
    for left, mine in enumerate(own):
        row = []
        for right, other in enumerate(own):
            if right < left:
                row.append(rows[right][left])
                continue
            between = torch.stack([(mean.double() * means[right][n]).sum() for n, mean in means[left].items()]).sum()
            product = squares[left]
            if right > left:
                product = ((mine + other).norms().double().square() - squares[left] - squares[right]) / 2
            row.append(product - along[left][right] - along[right][left] + between)
        rows.append(row)
    return torch.stack([torch.stack(row) for row in rows])[:, :, finite]
