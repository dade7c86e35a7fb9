"""The scattering transform against its definition: filters in space, sums over every pixel, no Fourier transform."""

from __future__ import annotations

import cmath
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import clipwise as cw
from clipwise.data import Scattering, load, scattered
from clipwise.data.scattering import blur, scatter, wavelets
from clipwise.models import build
from clipwise.types import InputError

Field = NDArray[np.complex128]


def exact(images: Tensor) -> Tensor:
    """The transform with filters in float64."""
    height, width = images.shape[2] + 8, images.shape[3] + 8
    return scatter(images, wavelets(height, width), blur(height), blur(width))


def on_the_torus(height: int, width: int, value: object) -> Field:
    """A function of (x, y) in the plane, summed over its copies on the torus."""
    field = np.zeros((height, width), dtype=complex)
    for y in range(-3 * height, 3 * height):
        for x in range(-3 * width, 3 * width):
            field[y % height, x % width] += value(x, y)  # type: ignore[operator]
    return field


def morlet(height: int, width: int, scale: int, angle: float) -> Field:
    """Gauss(u, v/2)·(exp(iξu) − κ), σ = 0.8·2^j, ξ = 3π/4·2^−j, turned by the angle."""
    sigma, xi = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale

    def gauss(x: int, y: int) -> tuple[float, float]:
        u, v = x * math.cos(angle) + y * math.sin(angle), -x * math.sin(angle) + y * math.cos(angle)
        return u, math.exp(-(u * u + v * v / 4) / (2 * sigma**2)) * 0.5 / (2 * math.pi * sigma**2)

    waves = on_the_torus(height, width, lambda x, y: gauss(x, y)[1] * cmath.exp(1j * xi * gauss(x, y)[0]))
    plain = on_the_torus(height, width, lambda x, y: gauss(x, y)[1])
    return waves - waves.sum() / plain.sum() * plain


def low_pass(height: int, width: int) -> Field:
    plain = on_the_torus(height, width, lambda x, y: math.exp(-(x * x + y * y) / (2 * 1.6**2)))
    return plain / plain.sum()


def convolved(field: Field, kernel: Field) -> Field:
    """Circular convolution, one shift of the kernel at a time."""
    total = np.zeros_like(kernel)
    for y, x in np.ndindex(*kernel.shape):
        total += kernel[y, x] * np.roll(field, (y, x), (0, 1))
    return total


def by_definition(image: NDArray[np.float64]) -> NDArray[np.float64]:
    """All 81 channels of one colour."""
    field = np.pad(image, 4, mode="reflect")
    height, width = field.shape
    phi = low_pass(height, width)
    psi = [[morlet(height, width, j, math.pi * k / 8) for k in range(8)] for j in range(2)]

    def kept(field: Field | NDArray[np.float64]) -> NDArray[np.float64]:
        return convolved(field, phi).real[4:-4:4, 4:-4:4]  # without the mirrored edges

    first = [[abs(convolved(field, psi[j][k])) for k in range(8)] for j in range(2)]
    second = [kept(abs(convolved(first[0][k], psi[1][m]))) for k in range(8) for m in range(8)]
    return np.stack([kept(field), *(kept(first[j][k]) for j in range(2) for k in range(8)), *second])


def test_the_transform_is_its_definition_in_space() -> None:
    images = torch.rand(1, 2, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = np.concatenate([by_definition(colour.numpy()) for colour in images[0]])
    assert np.allclose(exact(images)[0].numpy(), expected, rtol=0, atol=1e-10)


def test_cifar_images_have_243_channels_of_8_by_8() -> None:
    assert scattered(torch.rand(3, 3, 32, 32), chunk=2).shape == (3, 243, 8, 8)
    assert scattered(torch.rand(1, 1, 28, 28)).shape == (1, 81, 7, 7)


def blob(row: int, column: int) -> Tensor:
    """A small random picture in the middle of nothing, so that no edge is near."""
    field = torch.zeros(1, 1, 80, 80, dtype=torch.float64)
    field[:, :, row : row + 6, column : column + 6] = torch.rand(
        6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return field


def test_moving_the_image_by_four_pixels_moves_the_features_by_one() -> None:
    before, after = exact(blob(36, 36)), exact(blob(40, 32))
    assert torch.allclose(before.roll((1, -1), (2, 3)), after, atol=1e-12)
    assert not torch.allclose(before, after, atol=1e-3)


def test_a_turn_by_90_degrees_turns_the_angles_too() -> None:
    image = blob(38, 37)
    # pixel 4k of 80 goes to pixel 80 − 4k, which is kept too, after one more pixel
    turned = torch.rot90(image, 1, (2, 3)).roll((1, 0), (2, 3))
    before, after = exact(image), exact(turned)
    first = torch.rot90(before[:, 1:9], 1, (2, 3)).roll((1, 0), (2, 3))
    assert torch.allclose(first.roll(4, 1), after[:, 1:9], atol=1e-12)  # 8 angles are half a turn, 4 a quarter


def test_the_transform_brings_no_two_images_further_apart() -> None:
    waves = wavelets(48, 40)
    opposite = waves.flip(2, 3).roll((1, 1), (2, 3))
    rows, columns = (torch.fft.fft(torch.from_numpy(low_pass(side, 1)[:, 0].real)).abs() for side in (48, 40))
    total = (waves**2 + opposite**2).sum((0, 1)) / 2 + torch.outer(rows, columns) ** 2  # Littlewood and Paley's sum
    assert float(total.max()) <= 1 + 1e-9
    first, second = torch.rand(2, 1, 3, 40, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for other, least in ((second, 0.02), (torch.zeros_like(first), 0.5)):  # what is kept of the distance, at least
        apart = 16 * (exact(first) - exact(other)).square().sum()  # one pixel in 16 is kept
        distance = torch.nn.functional.pad(first - other, (4,) * 4, mode="reflect").square().sum()
        assert least * distance < apart < distance


def test_a_constant_image_has_its_value_and_no_ripples() -> None:
    features = exact(torch.full((1, 1, 16, 16), 0.7, dtype=torch.float64))
    assert torch.allclose(features[:, 0], torch.tensor(0.7, dtype=torch.float64), rtol=1e-12)
    assert features[:, 1:].abs().max() < 1e-12


def test_a_stripe_answers_at_its_own_angle_and_scale() -> None:
    column = torch.arange(48, dtype=torch.float64)
    for scale, frequency in enumerate((0.75 * math.pi, 0.375 * math.pi)):
        stripes = torch.cos(frequency * column).expand(1, 1, 48, 48)
        middle = exact(stripes)[0, 1:17, 4:8, 4:8].mean((1, 2)).unflatten(0, (2, 8))
        assert divmod(int(middle.argmax()), 8) == (scale, 0)


@pytest.mark.parametrize("name", ["scattering_linear", "scattering_cnn", "scattering_mnist_cnn"])
def test_a_head_on_features_made_beforehand_is_the_same_network(name: str) -> None:
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole, head = build(name, (3, 16, 16), 4), build(name, (243, 4, 4), 4)
    head.load_state_dict(dict(zip(head.state_dict(), whole.state_dict().values(), strict=True)))
    assert torch.allclose(whole(images), head(scattered(images)), atol=1e-6)
    batch = (scattered(images), torch.arange(2))
    assert torch.allclose(
        cw.per_sample(head, cw.cross_entropy, batch).norms(),
        cw.per_sample(whole, cw.cross_entropy, (images, torch.arange(2))).norms(),
        rtol=1e-4,
    )


def test_the_norm_before_a_head_is_each_samples_own_and_has_no_parameters() -> None:
    model = build("scattering_linear", (1, 8, 8), 4)
    (norm,) = (module for module in model if isinstance(module, torch.nn.GroupNorm))
    assert norm.num_groups == 27 and list(norm.parameters()) == []
    (other,) = (m for m in build("scattering_linear(groups=9)", (1, 8, 8), 4) if isinstance(m, torch.nn.GroupNorm))
    assert other.num_groups == 9


def test_the_filters_are_neither_trained_nor_saved() -> None:
    model = build("scattering_linear", (1, 8, 8), 4)
    assert [value.shape for value in model.state_dict().values()] == [(4, 81 * 2 * 2), (4,)]


def pictures(folder: Path) -> str:
    """An npz of small pictures in bytes."""
    numbers = np.random.default_rng(0)
    x, y = numbers.integers(0, 256, (30, 3, 8, 12), dtype=np.uint8), numbers.integers(0, 2, 30)
    np.savez(folder / "pictures.npz", x=x, y=y)
    return f"npz:{folder}/pictures.npz"


def test_data_with_features_hold_those_of_their_prepared_pictures(tmp_path: Path) -> None:
    text = pictures(tmp_path)
    plain, featured = (load(f"{text}?scale=centred&train=10{more}") for more in ("", "&features=scattering"))
    assert featured.shape == (243, 2, 3)
    assert (len(featured.train), len(featured.test)) == (10, len(plain.test))
    for part, of in ((featured.train, plain.train), (featured.test, plain.test)):
        (x, y), (images, labels) = part.data, of.data
        assert x.dtype == torch.float32
        assert torch.allclose(x, scattered(images), rtol=2**-11, atol=1e-7)  # float16 keeps 11 bits
        assert torch.equal(y, labels)


def test_features_are_of_pictures_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((10, 5), np.float32), y=np.arange(10) % 2)
    with pytest.raises(InputError, match=r"is for pictures \[channel, height, width\], got samples of shape \[5\]"):
        load(f"npz:{tmp_path}/rows.npz?features=scattering")
    np.savez(tmp_path / "whole.npz", x=np.zeros((10, 1, 8, 8), np.int32), y=np.arange(10) % 2)
    with pytest.raises(InputError, match="in bytes or fractions, got whole numbers"):
        load(f"npz:{tmp_path}/whole.npz?features=scattering")
    for shape, hint in (((10, 8, 12), "give them a channel by x"), ((10, 8, 12, 3), r"x\.transpose\(0, 3, 1, 2\)")):
        np.savez(tmp_path / "turned.npz", x=np.zeros(shape, np.uint8), y=np.arange(10) % 2)
        with pytest.raises(InputError, match=rf"got samples of shape .*: .*{hint}"):
            load(f"npz:{tmp_path}/turned.npz?features=scattering")
    with pytest.raises(InputError, match="unknown features"):
        load(f"{pictures(tmp_path)}?features=wavelets")


def test_sides_that_are_not_multiples_of_four_are_refused() -> None:
    with pytest.raises(InputError, match="sides in multiples of 4 from 8, got 30×32"):
        Scattering(30, 32)


@pytest.mark.parametrize("images", [torch.rand(3, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
def test_features_are_made_of_several_pictures_in_floats(images: Tensor) -> None:
    with pytest.raises(InputError, match=r"as floats \[sample, channel, height, width\], got .*: write images\[None\]"):
        scattered(images)
