"""The scattering transform of images, fixed features on which small networks learn privately what large ones cannot.

Receives: images [sample, colour, height, width] with sides in multiples of 4.
Gives: Scattering and scattered, 81 channels for each colour at a quarter of the resolution; with_features, a data set
whose images are replaced by them.

The transform is fixed: nothing is trained or measured on data, so computing it costs no privacy. With ψ_{j,θ} a Morlet
wavelet of scale 2^j and angle θ, φ a Gaussian of scale 2^J, J = 2 scales and L = 8 angles, its channels are
x∗φ, |x∗ψ_{j,θ}|∗φ and ||x∗ψ_{0,θ}|∗ψ_{1,θ'}|∗φ, at every 4th pixel: 1 + JL + L² = 81.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.data.datasets import Arrays
from clipwise.data.splits import Splits
from clipwise.types import Batch, InputError

SCALES, ANGLES = 2, 8
STEP = 2**SCALES  # the output keeps every STEP-th pixel, and the image is mirrored STEP pixels beyond its edge
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2


def wavelets(height: int, width: int) -> Tensor:
    """The Fourier transforms of ψ_{j,θ} on a torus of this size, which are real: [scale, angle, height, width]."""
    return torch.stack(
        [torch.stack([_wavelet(height, width, j, math.pi * k / ANGLES) for k in range(ANGLES)]) for j in range(SCALES)]
    )


def _wavelet(height: int, width: int, scale: int, angle: float) -> Tensor:
    """ψ = g·(e^{iξu} − κ) with κ such that the mean is 0, and g a Gaussian that is longer across than along u."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / ANGLES
    y, x = (_unrolled(side) for side in (height, width))
    y, x = y[:, None], x[None, :]
    u, v = math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x
    envelope = torch.exp(-(u**2 + (slant * v) ** 2) / (2 * sigma**2)) * slant / (2 * math.pi * sigma**2)
    wave, flat = (
        torch.fft.fft2(_rolled(t, height, width)).real for t in (torch.polar(envelope, frequency * u), envelope)
    )
    return wave - wave[0, 0] / flat[0, 0] * flat


REACH = 2  # how many turns around the torus a filter is followed


def _unrolled(side: int) -> Tensor:
    """The coordinates of a side and of its copies: −REACH·side … (REACH + 1)·side − 1."""
    return torch.arange(-REACH * side, (REACH + 1) * side, dtype=torch.float64)


def _rolled(field: Tensor, height: int, width: int) -> Tensor:
    """The sum of all copies: the field on the torus."""
    copies = 2 * REACH + 1
    return field.reshape(copies, height, copies, width).sum((0, 2))


def blur(side: int) -> Tensor:
    """x∗φ along one side, at every STEP-th pixel and without the mirrored edges: [(side − 2·STEP)/STEP, side]."""
    sigma = 0.8 * 2 ** (SCALES - 1)
    gauss = torch.exp(-(_unrolled(side) ** 2) / (2 * sigma**2)).reshape(-1, side).sum(0)
    places = torch.arange(STEP, side - STEP, STEP)
    return (gauss / gauss.sum())[(places[:, None] - torch.arange(side)) % side]


def scatter(images: Tensor, waves: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The transform with given filters: [sample, colour, height, width] → [sample, colour · 81, height/4, width/4]."""
    mirrored = F.pad(images, (STEP,) * 4, mode="reflect")[:, :, None]  # [sample, colour, 1, …]

    def ripples(fields: Tensor, scale: int) -> Tensor:
        """|field∗ψ| for all angles, as further entries of the third dimension."""
        transformed = torch.fft.fft2(fields)[:, :, :, None] * waves[scale]
        return torch.fft.ifft2(transformed).abs().flatten(2, 3)

    def blurred(fields: Tensor) -> Tensor:
        return rows @ fields @ columns.T

    first = [ripples(mirrored, scale) for scale in range(SCALES)]
    # one angle of the first wavelet at a time: all 64 fields of the second order at once take much memory
    second = [blurred(ripples(fields, 1)) for fields in first[0].split(1, dim=2)]
    return torch.cat([blurred(mirrored), *map(blurred, first), *second], dim=2).flatten(1, 2)


class Scattering(nn.Module):
    """The transform for images of one size; its filters are buffers that a state_dict leaves out."""

    waves: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        if not fits(height, width):
            raise InputError(
                f"scattering takes sides in multiples of {STEP} from {2 * STEP}, got {height}×{width}: cut, pad or "
                "resize the pictures"
            )
        self.size = (height, width)
        height, width = height + 2 * STEP, width + 2 * STEP
        for name, filters in (("waves", wavelets(height, width)), ("rows", blur(height)), ("columns", blur(width))):
            self.register_buffer(name, filters.to(torch.get_default_dtype()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """[sample, colour, height, width] → [sample, colour · 81, height/4, width/4]."""
        return scatter(images, self.waves, self.rows, self.columns)

    def extra_repr(self) -> str:
        """The size, for print."""
        return f"{self.size[0]}×{self.size[1]}"


def fits(*sides: int) -> bool:
    """Whether images with these sides can be transformed."""
    return all(side >= 2 * STEP and side % STEP == 0 for side in sides)


def scattered(images: Tensor, chunk: int = 8) -> Tensor:
    """The features of images, a few at a time in each of PyTorch's threads: its transforms use one alone."""
    if images.ndim != 4 or not images.is_floating_point():
        raise InputError(
            f"expected pictures as floats [sample, channel, height, width], got {images.dtype} of shape "
            f"{list(images.shape)}: write images[None] for one alone, images / 255 for bytes"
        )
    transform = torch.no_grad()(Scattering(images.shape[2], images.shape[3]).to(images).forward)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return torch.cat(list(threads.map(transform, images.split(chunk))))


def channels_first(shape: Sequence[int]) -> str:
    """What to write where samples look like pictures without a channel, or with their channels last; else nothing."""
    if len(shape) == 2:
        return "give them a channel by x[:, None]"
    if len(shape) == 3 and shape[2] in (1, 3) and min(shape[:2]) >= 2 * STEP:
        return "put the channels first by x.transpose(0, 3, 1, 2)"
    return ""


def with_features(splits: Splits) -> Splits:
    """The same data with the features of its pictures in their place, made once for all steps.

    They are kept in float16, CIFAR-10's would take 3.7 GB otherwise, and are float32 when a batch is read.
    """
    turn = channels_first(splits.shape)
    if len(splits.shape) != 3 or turn:
        raise InputError(
            f"features=scattering is for pictures [channel, height, width], got samples of shape {list(splits.shape)}: "
            f"{turn or 'leave it out'}"
        )
    if splits.tokens:
        raise InputError(
            "features=scattering is for pictures in bytes or fractions, got whole numbers: write x.astype('uint8')"
        )
    colours, height, width = splits.shape
    shape = (CHANNELS * colours, height // STEP, width // STEP)

    def featured(part: Arrays) -> Arrays:
        features = torch.empty(len(part), *shape, dtype=torch.float16)
        labels = []
        for rows in torch.arange(len(part)).split(1024):
            pictures, some = part.rows(rows)
            features[rows] = narrow(pictures)
            labels.append(some)
        return Arrays((features, torch.cat(labels)), _wide)

    return replace(splits, train=featured(splits.train), test=featured(splits.test), shape=shape)


def narrow(pictures: Tensor) -> Tensor:
    """The features of pictures as a data set keeps them."""
    return scattered(pictures).half()


def _wide(batch: Batch) -> Batch:
    features, labels = batch
    return features.float(), labels
