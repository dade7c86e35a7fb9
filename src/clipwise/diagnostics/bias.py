"""Clipping bias: how far the mean of the weighted gradients is from the true mean.

Receives: per-sample gradients of one batch and methods, for which they are read together.
Gives: ClippingBias, overall and for each layer, not private.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.accounting.dice import sensitivity
from clipwise.diagnostics.finite import FiniteGradients, Mean, finite_part, layers_of, within
from clipwise.diagnostics.together import products
from clipwise.methods import Block, Method, as_method
from clipwise.records import SampleGradients
from clipwise.step import weigh
from clipwise.types import InputError, positive

NOT_PRIVATE = "not private: for the data's owner only"


@dataclass(frozen=True)
class ClippingBias:
    """Bias of one batch's clipped mean g̃ as an estimate of the true mean ĝ. Not private.

    Guarantees: magnitude² = (1 − along)² ‖ĝ‖² + across², since g̃ = a ĝ + c with c orthogonal to ĝ.
    Edge cases: cosine and along are 0 where ĝ or g̃ is 0.
    """

    magnitude: float  # ‖g̃ − ĝ‖ (paper 3, Fig. 2)
    cosine: float  # of g̃ and ĝ: the directional part, free of scale (paper 3, Fig. 6; paper 4, Fig. 3)
    along: float  # a in g̃ = a ĝ + c: the magnitude error, which a learning rate can undo (paper 3, appendix C)
    across: float  # ‖c‖: the directional error, which nothing undoes
    length: float  # ‖g̃‖
    clipped: float  # share of samples that were shortened
    median_norm: float
    noise: float | None = None  # root mean square length of the released gradient's noise, where that is known
    note: str = NOT_PRIVATE

    @property
    def direction_error(self) -> float:
        """Share of g̃ that does not lie along ĝ: ‖c‖/‖g̃‖ in g̃ = a ĝ + c (paper 3, appendix C). 0 is unbiased.

        Where nothing is left of ĝ, as when every sample is above a threshold, it is 1: no part of g̃ lies along it.
        """
        if not self.length:
            return 1.0 if self.magnitude else 0.0
        return self.across / self.length

    @property
    def signal_to_noise(self) -> float | None:
        """‖g̃‖ over the length of the noise that is released with it."""
        return self.length / self.noise if self.noise else None

    @property
    def alignment(self) -> float | None:
        """Cosine of the released gradient with ĝ, where the noise has its usual length and is orthogonal to both.

        Bias and noise in one number that no learning rate changes: cos · ‖g̃‖/√(‖g̃‖² + noise²). In d dimensions a
        single draw differs from it by about 1/√d.
        """
        return self.cosine * self.length / math.hypot(self.length, self.noise) if self.noise else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with what follows from them."""
        derived = ("direction_error", "signal_to_noise", "alignment")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Effect:
    """What one method does to a batch of gradients: to the whole gradient, and to each layer's part. Not private."""

    whole: ClippingBias
    layers: Mapping[str, ClippingBias]
    unseen: str = ""  # state of the method that a single batch does not show

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        layers = {name: bias.as_dict() for name, bias in self.layers.items()}
        return {**self.whole.as_dict(), "unseen": self.unseen, "layers": layers}


def clipping_bias(gradients: SampleGradients, method: Method | str) -> ClippingBias:
    """The bias that ``method`` would have on these samples; several methods may look at the same gradients."""
    chosen, looked = as_method(method), finite_part(gradients)
    (found,), _ = effects(looked, [chosen], looked.mean())
    return found.whole


def effects(
    looked: FiniteGradients,
    methods: Sequence[Method],
    true: Mean,
    *,
    noise_multiplier: float | None = None,
    expected_batch: float | None = None,
) -> tuple[list[Effect], Tensor]:
    """What each method makes of the gradients that were seen, as an estimate of the mean ``true``; and ⟨v_i, ĝ⟩.

    ``looked`` is what the methods weigh: gradients at θ, or where a probe takes them; they are read once for all
    methods. With the noise multiplier and the expected batch, also the noise that would be released.
    """
    names = looked.gradients.names
    layers = layers_of(names)
    parts = [names, *layers.values()]
    squares = looked.sq_norms(parts)
    medians = looked.kept(squares).sqrt().median(0).values.tolist()
    weights: dict[str, list[Tensor]] = {name: [] for name in names}
    clipped = []
    for method in methods:
        blocks = method.blocks(names)
        norms = looked.sq_norms([block.names for block in blocks]).sqrt()  # [unit, block]
        columns = (weigh(blocks, norms) / looked.count).unbind(1)  # 0 for a gradient that is zero or was not finite
        for block, column in zip(blocks, columns, strict=True):
            for name in block.names:
                weights[name].append(column)
        clipped.append(_clipped(looked, blocks, norms, parts, squares))
    read = products(looked.gradients, {name: _stacked(own, looked) for name, own in weights.items()}, true.value)
    found = []
    for k, method in enumerate(methods):
        noise = _noise(looked, method.blocks(names), method, noise_multiplier, expected_batch)
        biases = [
            _bias(
                true.sq_norm(own),
                *(sum(read.sums[name][k][which] for name in own) for which in range(2)),
                clipped=clipped[k][i],
                median_norm=medians[i],
                noise=None if noise is None else math.sqrt(sum(noise[name] for name in own)),
            )
            for i, own in enumerate(parts)
        ]
        unseen = "feedback" if method.feedback else "momentum of each sample" if method.recall else ""
        found.append(Effect(biases[0], dict(zip(layers, biases[1:], strict=True)), unseen))
    return found, read.inner


def _stacked(columns: list[Tensor], looked: FiniteGradients) -> Tensor:
    return torch.stack(columns) if columns else looked.squares.new_zeros(0, len(looked.squares))


def _clipped(
    looked: FiniteGradients, blocks: Sequence[Block], norms: Tensor, parts: Sequence[Sequence[str]], squares: Tensor
) -> list[float]:
    """The share of samples that some block shortens, for each part of the parameters."""
    # by the method's own ω: the step's margin for rounding shortens every gradient a little
    short = torch.stack([block.weigh(n) < 1 for block, n in zip(blocks, norms.unbind(1), strict=True)], 1) & (norms > 0)
    block_of = {name: i for i, block in enumerate(blocks) for name in block.names}
    own = [sorted({block_of[name] for name in part}) for part in parts]
    shortened = (short.to(squares) @ within(range(len(blocks)), own).to(squares) > 0) & (squares > 0)
    shares: list[float] = looked.kept(shortened).double().mean(0).tolist()
    return shares


def _bias(gg: float, kk: float, kg: float, **known: Any) -> ClippingBias:
    """From ⟨ĝ, ĝ⟩, ⟨g̃, g̃⟩ and ⟨g̃, ĝ⟩."""
    along = kg / gg if gg > 0 else 0.0
    return ClippingBias(
        magnitude=math.sqrt(max(0.0, kk - 2 * kg + gg)),
        cosine=kg / math.sqrt(gg * kk) if gg > 0 and kk > 0 else 0.0,
        along=along,
        across=math.sqrt(max(0.0, kk - along * kg)),
        length=math.sqrt(kk),
        **known,
    )


def _noise(
    looked: FiniteGradients,
    blocks: Sequence[Block],
    method: Method,
    noise_multiplier: float | None,
    expected_batch: float | None,
) -> dict[str, float] | None:
    """Expected squared length of the noise in each parameter of the released mean: d (σ Δ_r)²/share_r/B²."""
    if (noise_multiplier is None) != (expected_batch is None):
        raise InputError("the noise of a release needs both its noise_multiplier and its expected_batch, got one")
    if noise_multiplier is None or expected_batch is None:
        return None
    sigma = positive("noise_multiplier", noise_multiplier)
    units = positive("expected_batch", expected_batch) / method.unit
    like: Mapping[str, Tensor] = looked.gradients.like
    return {
        name: like[name].numel() * (sigma * _moved(method, block, expected_batch) / units) ** 2 / block.share
        for block in blocks
        for name in block.names
    }


def _moved(method: Method, block: Block, expected_batch: float) -> float:
    """Δ_r, what the step's noise is scaled by: how far one sample moves the block's sum, with what is fed back."""
    feedback = method.feedback
    if feedback is None:
        return method.moves * block.bound
    return sensitivity(feedback.memory, block.bound, expected_batch * feedback.clip_norm, feedback.groups)
