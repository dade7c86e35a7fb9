"""Views of pictures: against padding and cutting one picture at a time, and what may and may not move a view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clipwise.data import views
from clipwise.types import InputError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
M = 2**64


def splitmix(z: int) -> int:
    """The finaliser of splitmix64, in whole numbers of any size."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % M
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % M
    return z ^ (z >> 31)


def drawn(seed: int, key: int, view: int) -> tuple[int, int, bool]:
    """Down, right and flip of one view."""
    step = 0x9E3779B97F4A7C15
    bits = splitmix((splitmix(splitmix((seed + step) % M) ^ (key % M)) + (view + 1) * step) % M)
    return (bits % 2**20) * 9 >> 20, (bits // 2**20 % 2**20) * 9 >> 20, bool(bits // 2**40 % 2)


def slow(x: Tensor, count: int, seed: int, augment: str, keys: list[int]) -> Tensor:
    """One view at a time: pad, cut, turn."""
    out = []
    for picture, key in zip(x.numpy(), keys, strict=True):
        for view in range(count):
            down, right, flip = drawn(seed, key, view)
            one = picture
            if "crop" in augment:
                padded = np.pad(picture, ((0, 0), (4, 4), (4, 4)), mode="reflect")
                one = padded[:, down : down + x.shape[2], right : right + x.shape[3]]
            if "flip" in augment and flip:
                one = one[:, :, ::-1]
            out.append(torch.from_numpy(one.copy()))
    return torch.stack(out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augment", ["crop", "flip", "crop-flip"])
@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (3, 1, 28, 28), (2, 2, 5, 9), (1, 1, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64])
def test_views_are_what_padding_cutting_and_turning_give(
    device: str, augment: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 255).to(dtype)
    for count, seed in ((1, 0), (7, 2**63 + 11), (3, 123)):
        found = views(x.to(device), count, seed, augment)
        assert found.dtype == dtype and found.device.type == device
        assert torch.equal(found.cpu(), slow(x, count, seed, augment, list(range(shape[0]))))
    keys = [10**12 + 7 * row for row in range(shape[0])]
    found = views(x.to(device), 4, 5, augment, torch.tensor(keys))
    assert torch.equal(found.cpu(), slow(x, 4, 5, augment, keys))


def pictures(n: int) -> Tensor:
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def test_asking_again_gives_the_same_views_and_another_seed_gives_others() -> None:
    x = pictures(20)
    first = views(x, 4, 77)
    assert torch.equal(views(x, 4, 77), first)
    assert not any(torch.equal(views(x, 4, seed), first) for seed in (0, 76, 78, 77 + 2**32))


def test_a_samples_views_are_its_own_whoever_else_is_in_the_batch() -> None:
    x, keys = pictures(12), torch.arange(100, 112)
    whole = views(x, 3, 9, keys=keys).view(12, 3, *x.shape[1:])
    order = torch.tensor([7, 2, 11])
    assert torch.equal(views(x[order], 3, 9, keys=keys[order]).view(3, 3, *x.shape[1:]), whole[order])
    pieces = [views(part, 3, 9, keys=own) for part, own in zip(x.split(5), keys.split(5), strict=True)]
    assert torch.equal(torch.cat(pieces), whole.flatten(0, 1))


def test_changing_one_picture_changes_only_its_own_rows() -> None:
    x = pictures(6)
    other = x.clone()
    other[4] = 0
    moved = (views(x, 5, 3) != views(other, 5, 3)).flatten(1).any(1)
    assert moved.view(6, 5).any(1).tolist() == [False, False, False, False, True, False]
    assert bool(moved[20:25].all())


def test_fewer_views_are_the_first_of_more() -> None:
    x = pictures(4)
    shape = (4, -1, *x.shape[1:])
    assert torch.equal(views(x, 8, 1).view(shape)[:, :3], views(x, 3, 1).view(shape))


def test_every_place_and_both_sides_come_equally_often_and_views_do_not_follow_each_other() -> None:
    # a picture whose pixels name their own place shows what was drawn
    side, n, count = 16, 3000, 6
    x = torch.arange(side * side, dtype=torch.float64).view(1, 1, side, side).expand(n, 1, side, side)
    found = views(x, count, 2024).view(n, count, side, side)
    middle, beside = found[..., 8, 8].long(), found[..., 8, 9].long()
    flip = beside < middle
    down, column = middle // side - 4, middle % side
    right = torch.where(flip, column - 3, column - 4)
    assert down.aminmax() == (0, 8) and right.aminmax() == (0, 8)
    cells = torch.bincount((down * 18 + right * 2 + flip).flatten(), minlength=162)
    expected = n * count / 162
    # χ² with 161 degrees of freedom has mean 161 and deviation 18
    assert float(((cells - expected) ** 2 / expected).sum()) < 161 + 5 * 18
    for drawn_ in (down, right, flip):
        values = drawn_.double() - drawn_.double().mean()
        for a, b in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:]), (values[:, 0], values[:, -1])):
            correlation = float((a * b).mean() / values.square().mean())
            assert abs(correlation) < 5 / (a.numel() ** 0.5)


def test_no_augmentation_repeats_each_row_and_one_view_of_it_is_the_row_itself() -> None:
    for x in (pictures(3), torch.arange(6).view(3, 2), torch.rand(3)):
        assert views(x, 1, 0, "none") is x
        assert torch.equal(views(x, 3, 0, "none"), torch.stack([x, x, x], 1).flatten(0, 1))


def test_an_empty_batch_has_no_views() -> None:
    assert views(pictures(3)[:0], 4, 1).shape == (0, 3, 16, 16)


def test_channels_in_another_memory_order_give_the_same_views() -> None:
    x = pictures(5)
    assert torch.equal(views(x.contiguous(memory_format=torch.channels_last), 3, 8), views(x, 3, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 10), 2, 0), r"'crop-flip' needs pictures .* got shape \[4, 10\]: write augment='none'"),
        ((torch.zeros(4, 28, 28), 2, 0, "flip"), r"got shape \[4, 28, 28\].*x\[:, None\]"),
        ((torch.zeros(4, 1, 4, 28), 2, 0, "crop"), "mirrors 4 pixels and needs larger pictures, got 4×28"),
        ((torch.zeros(4, 1, 8, 8), 0, 0), "views must be a whole number of at least 1, got 0"),
        ((torch.zeros(4, 1, 8, 8), 2, 0, "crop-flop"), "unknown augmentation 'crop-flop': did you mean 'crop-flip'"),
        ((torch.zeros(4, 1, 8, 8), 2, 0, "crop", torch.arange(3)), "each of the 4 pictures.*write keys=indices"),
        ((torch.zeros(4, 1, 8, 8), 2, 0, "crop", torch.zeros(4)), "got torch.float32 of shape"),
    ],
)
def test_what_cannot_be_viewed_is_an_error_of_one_line(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        views(*arguments)
    assert "\n" not in str(caught.value)
