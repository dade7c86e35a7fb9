"""Layerwise clipping: each block of parameters is clipped on its own; the noise follows the joint sensitivity.

Receives: a base method, or one for each block by the module that its parameters are in.
Gives: a Method with one Block per layer, whose joint bound is √Σ C_r².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

from clipwise.methods.citations import MCMAHAN_2018
from clipwise.methods.flat import flat
from clipwise.methods.method import Block, Method
from clipwise.types import InputError, nearest, one_of

Noise = Literal["equal", "proportional"]


def layerwise(base: Method | Mapping[str, Method] | None = None, noise: Noise = "equal") -> Method:
    """Per-layer clipping.

    ``layerwise(flat(1.0))`` gives each of L layers C/√L, so that the joint sensitivity is flat's; a mapping from names
    of modules or parameters to methods gives each block its own bound: a parameter is in the block of the longest name
    that holds it, and "" holds them all. Noise is σ√ΣC_r² in every block ("equal"), or σ C_r √L ("proportional"):
    both are one Gaussian mechanism with noise multiplier σ.
    """
    one_of("noise", noise, get_args(Noise))
    chosen = flat() if base is None else base
    given = MappingProxyType(dict(chosen)) if isinstance(chosen, Mapping) else None
    if given is not None and not given:
        raise InputError("layerwise needs at least one block, got {}; write layerwise({'': flat(1.0)})")
    for method in given.values() if given is not None else [chosen]:
        if not isinstance(method, Method) or "clip_norm" not in method.settings or method.feedback or method.count:
            raise InputError(f"layerwise takes methods with one fixed bound such as flat(1.0), got {method}")

    @cache  # the same blocks whenever they are asked for: what was recorded for some serves for equal ones
    def split(names: Sequence[str]) -> tuple[Block, ...]:
        members = _by_prefix(names, given) if given is not None else by_layer(names)
        if given is not None:
            each = {key: given[key] for key in members}
        else:
            assert isinstance(chosen, Method)
            each = {key: _rescaled(chosen, chosen.bound / math.sqrt(len(members))) for key in members}
        total = sum(method.bound**2 for method in each.values())  # joint sensitivity² = Σ C_r²
        share = {key: method.bound**2 / total if noise == "equal" else 1 / len(members) for key, method in each.items()}
        return tuple(Block(own, each[key].weigh, each[key].bound, share[key]) for key, own in members.items())

    first = next(iter(given.values())) if given else chosen
    assert isinstance(first, Method)
    bound = math.hypot(*(m.bound for m in given.values())) if given else first.bound
    settings = {"base": given if given is not None else chosen, "noise": noise}
    return Method("layerwise", MCMAHAN_2018, settings, first.weigh, bound, split=split)


def _rescaled(method: Method, clip_norm: float) -> Method:
    """The same method with another clip norm."""
    from clipwise.methods import METHODS

    if method.split is not None:
        raise InputError(f"expected a method with one clip norm such as flat(1.0), got {method}")
    if method.name not in METHODS:
        raise InputError(
            f"layerwise cannot give each layer its part of the clip norm of {method.name}, whose factory it does not "
            f"know: write clipwise.METHODS[{method.name!r}] = its factory, or a method for each block, layerwise({{…}})"
        )
    return METHODS[method.name](**{**method.settings, "clip_norm": clip_norm})


def by_layer(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """A layer is what shares a module: weight and bias together."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return {layer: tuple(own) for layer, own in layers.items()}


def _by_prefix(names: Sequence[str], given: Mapping[str, Method]) -> dict[str, tuple[str, ...]]:
    blocks: dict[str, list[str]] = {}
    for name in names:
        matching = [key for key in given if _holds(key, name)]
        if not matching:
            raise InputError(f"no block of layerwise holds the parameter {name}; add a block '' for the rest")
        blocks.setdefault(max(matching, key=len), []).append(name)
    for key in given:
        if key not in blocks:
            raise InputError(f"no parameter falls in the block {key!r} of layerwise; {nearest(key, names)}")
    return {key: tuple(own) for key, own in blocks.items()}


def _holds(key: str, name: str) -> bool:
    """Whether the parameter is the one of this name or in the module of this name; everything is in ""."""
    return not key or name == key or name.startswith(key if key.endswith(".") else f"{key}.")
