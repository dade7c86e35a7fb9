"""Views: random crops and mirror images of pictures, several of each (De et al. 2022).

Receives: pictures [n, channel, height, width], how many views of each, a seed, and perhaps a key for each picture.
Gives: [n · count, channel, height, width]: the views of one picture stand together; all on the pictures' own device.

What is drawn for a view depends on the seed, the picture's key and the view's number, and on nothing else: neither on
the other pictures, nor on the chunk that a picture came in, nor on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.types import InputError, one_of, whole

AUGMENTATIONS = ("none", "crop", "flip", "crop-flip")
PAD = 4  # pixels that are mirrored at each border before a crop


def views(x: Tensor, count: int, seed: int | Tensor, augment: str = "crop-flip", keys: Tensor | None = None) -> Tensor:
    """``count`` views of each picture, a picture's views together.

    "crop" mirrors 4 pixels at each border and cuts out the old size at a random place; "flip" swaps left and right with
    probability ½; "none" repeats the picture. Give the samples' numbers as ``keys``: a sample's views are then its own
    whoever else is in the batch. Without them a picture's place in ``x`` is its key.

    *Guarantees.* The same seed and keys give the same views, on every device. Row i of ``x`` enters rows i·count to
    (i+1)·count − 1 of the result and no other.
    *Edge cases.* No pictures give no views.
    """
    whole("views", count)
    one_of("augmentation", augment, AUGMENTATIONS)
    if augment == "none":
        return x if count == 1 else x.repeat_interleave(count, 0)
    if x.dim() != 4:
        raise InputError(
            f"the augmentation {augment!r} needs pictures [n, channel, height, width], got shape {list(x.shape)}: "
            "write augment='none', or give pictures without a channel one by x[:, None]"
        )
    n, channels, height, width = x.shape
    crop = augment != "flip"
    if crop and min(height, width) <= PAD:
        raise InputError(f"a crop mirrors {PAD} pixels and needs larger pictures, got {height}×{width}: write 'flip'")
    bits = draws(_keys(x, keys), count, seed)[..., None]  # [n, view, 1]
    down, right = (_below(2 * PAD + 1, bits, 0), _below(2 * PAD + 1, bits, 20)) if crop else (PAD, PAD)
    rows = _mirrored(torch.arange(height, device=x.device) + down - PAD, height)  # [n or 1, view or 1, height]
    columns = torch.arange(width, device=x.device)
    if augment != "crop":
        columns = torch.where((bits >> 40) & 1 == 1, width - 1 - columns, columns)
    columns = _mirrored(columns + right - PAD, width)
    places = (rows[..., :, None] * width + columns[..., None, :]).expand(n, count, height, width)
    # one gather: neither the picture nor the place is copied for each view or channel
    shape = (n, count, channels, height * width)
    places = places.reshape(n, count, 1, height * width).expand(shape)
    return x.reshape(n, 1, channels, height * width).expand(shape).gather(3, places).view(-1, *x.shape[1:])


def _keys(x: Tensor, keys: Tensor | None) -> Tensor:
    if keys is None:
        return torch.arange(len(x), device=x.device)
    if keys.shape != x.shape[:1] or keys.dtype != torch.long:
        raise InputError(
            f"keys must be one whole number (int64) for each of the {len(x)} pictures, got {keys.dtype} of shape "
            f"{list(keys.shape)}: write keys=indices, the samples' numbers"
        )
    return keys.to(x.device)


def _mirrored(place: Tensor, length: int) -> Tensor:
    """Places beyond a border, reflected at the outermost pixel, which is not repeated."""
    place = place.abs()
    return torch.where(place >= length, 2 * (length - 1) - place, place)


def draws(keys: Tensor, count: int, seed: int | Tensor) -> Tensor:
    """63 random bits for each view, [n, view]: counters through splitmix64 (Steele et al. 2014)."""
    start = seed if isinstance(seed, Tensor) else torch.tensor(_signed(seed), device=keys.device)
    return _draws(keys, count, start)


# one node to a compiler: torch 2.13's gave wrong numbers where it fused all of this with what it is used for
@torch.library.custom_op("clipwise::draws", mutates_args=())
def _draws(keys: Tensor, count: int, seed: Tensor) -> Tensor:
    step = _signed(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio
    own = _mixed(_mixed(seed + step) ^ keys)
    numbers = torch.arange(1, count + 1, device=keys.device)
    return _mixed(own[:, None] + numbers * step) & ((1 << 63) - 1)


@_draws.register_fake
def _fake_draws(keys: Tensor, count: int, seed: Tensor) -> Tensor:
    return keys.new_empty(len(keys), count)


def _mixed(z: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 wraps around as uint64 does."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z >> by as for an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _below(limit: int, bits: Tensor, place: int) -> Tensor:
    """A number in 0 … limit − 1 from the 20 bits at ``place``; uniform to one part in 10⁵."""
    return ((bits >> place) & 0xFFFFF) * limit >> 20
