"""Tensors in lists, tuples and mappings: batches, and the arguments and results of calls.

Receives: such a tree of tensors.
Gives: tensors, one after another; mapped, the same tree of changed ones; row, picked and on_device, for batches;
vmapped, a call whose arguments are trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors(*trees: object) -> Iterator[Tensor]:
    """Every tensor in arguments, in order; lists, tuples and mappings are looked into."""
    for tree in trees:
        if isinstance(tree, Tensor):
            yield tree
        elif isinstance(tree, (list, tuple)):
            yield from tensors(*tree)
        elif isinstance(tree, Mapping):
            yield from tensors(*tree.values())


def mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same arguments with each tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    return _rebuilt(tree, lambda part: mapped(part, function))


def row(batch: Any, index: int) -> Any:
    """One row of a batch, as a batch of its own."""
    return mapped(batch, lambda t: t[index : index + 1] if t.dim() else t)


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on that device."""
    return mapped(batch, lambda t: t.to(device))


def picked(batch: Any, rows: Tensor) -> Any:
    """The rows of a batch with these numbers, in this order."""
    return mapped(batch, lambda t: t[rows.to(t.device)] if t.dim() else t)


def _rebuilt(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A list, tuple or mapping of changed parts; anything else as it is."""
    if isinstance(tree, (list, tuple)):
        parts = [change(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, Mapping):
        items = {key: change(value) for key, value in tree.items()}
        return items if isinstance(tree, dict) else type(tree)(items)  # type: ignore[call-arg]
    return tree


def vmapped(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    place: Callable[[Tensor], tuple[Tensor, int | None]],
    randomness: str,
) -> Any:
    """A call mapped over its tensors: ``place`` says for each what to map and along which dimension."""
    flat, dims = list[Tensor](), list[int | None]()

    def take(argument: Tensor) -> _Place:
        value, dim = place(argument)
        flat.append(value)
        dims.append(dim)
        return _Place(len(flat) - 1)

    places = mapped((args, kwargs), take)

    def single(*values: Tensor) -> Any:
        own_args, own_kwargs = _filled(places, values)
        return function(*own_args, **own_kwargs)

    return torch.vmap(single, in_dims=tuple(dims), randomness=randomness)(*flat)


class _Place(int):
    """The index of a tensor that was taken out of an argument tree."""


def _filled(tree: Any, values: Sequence[Tensor]) -> Any:
    return values[tree] if isinstance(tree, _Place) else _rebuilt(tree, lambda part: _filled(part, values))
