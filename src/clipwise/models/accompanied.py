"""A network with BatchNorm for ``batch_clipping``: a private sample and its public companions are normalised together.

Receives: a network with BatchNorm, public inputs, and how many of them go with each sample.
Gives: Accompanied, which takes units [n, 1 + p, …] while it is trained, and plain inputs [n, …] for predictions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clipwise.types import InputError, whole


class UnitNorm(nn.Module):
    """BatchNorm over units of ``size`` consecutive rows, without running statistics, which would be of private data."""

    def __init__(self, features: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.size, self.eps = 1, eps
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """[unit · size, feature, …]."""
        units = x.unflatten(0, (-1, self.size))  # [unit, row, feature, …]
        over = (1, *range(3, units.dim()))
        variance, mean = torch.var_mean(units, over, correction=0, keepdim=True)
        x = ((units - mean) * torch.rsqrt(variance + self.eps)).flatten(0, 1)
        if self.weight is None or self.bias is None:
            return x
        shape = (1, -1, *(1,) * (x.dim() - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


class Accompanied(nn.Module):
    """A classifier whose every sample goes through the network with ``companions`` public inputs (paper 0 §5.2).

    Guarantees: a sample's output depends on that sample and on public inputs only. Predictions are the majority of
    ``draws`` draws of companions, as the logarithm of each class's share of the votes.
    """

    def __init__(self, network: nn.Module, public: Tensor, companions: int, draws: int = 10) -> None:
        """The network is changed: each BatchNorm in it becomes a UnitNorm with the same weights."""
        super().__init__()
        self.companions, self.draws = whole("companions", companions), whole("draws", draws)
        if not isinstance(public, Tensor) or len(public) == 0:
            raise InputError(
                "public must be a tensor of inputs, one per row, got none; write for instance x_public[:100]"
            )
        self.network = converted(network)
        self.register_buffer("public", public.clone())
        norms = [module for module in self.network.modules() if isinstance(module, UnitNorm)]
        if not norms:
            raise InputError(
                "companions change nothing in a network without BatchNorm, and this one has none: write one with it, "
                "such as --model resnet20_bn, or a method without companions"
            )
        for norm in norms:
            norm.size = 1 + companions

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1 + companions, …] → the first one's outputs; [n, …] → votes."""
        public = self.get_buffer("public")
        if x.shape[1:] == (1 + self.companions, *public.shape[1:]):
            return self._first(x)
        if x.shape[1:] != public.shape[1:]:
            raise InputError(
                f"expected inputs of shape {list(public.shape[1:])}, or units of {1 + self.companions} of them, "
                f"got {list(x.shape[1:])}; train with the method batch_clipping(companions={self.companions})"
            )
        if self.training:
            raise InputError(
                "in training mode a sample needs its companions; write method=batch_clipping(…), or model.eval()"
            )
        each = []
        for _ in range(self.draws):
            chosen = torch.randint(len(public), (len(x), self.companions), device=x.device)
            outputs = self._first(torch.cat([x[:, None], public[chosen].to(x.dtype)], 1))
            each.append(nn.functional.one_hot(outputs.argmax(1), outputs.shape[1]))
        votes = torch.stack(each).sum(0)
        shares = (votes + 1 / votes.shape[1]) / (self.draws + 1)  # no class has probability zero
        return shares.to(x.dtype if x.is_floating_point() else torch.float32).log()

    def _first(self, units: Tensor) -> Tensor:
        outputs: Tensor = self.network(units.flatten(0, 1))
        return outputs.unflatten(0, (-1, 1 + self.companions))[:, 0]


def converted(network: nn.Module) -> nn.Module:
    """The network with each BatchNorm replaced by a UnitNorm."""
    if isinstance(network, _BatchNorm):
        norm = UnitNorm(network.num_features, network.eps, network.affine)
        if network.affine:
            norm.load_state_dict({"weight": network.weight, "bias": network.bias})
        return norm
    for name, child in network.named_children():
        setattr(network, name, converted(child))
    return network
