"""The networks that clipwise trains by name, one file per family.

Receives: a name, perhaps with options as in ``mlp(hidden=32)``, the shape of one sample, the number of classes.
Gives: MODELS (name → Network), the one table of them; build, which fits a network to the data or says what does not
fit; list, a row for each; takes_tokens.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from clipwise.data.scattering import channels_first
from clipwise.methods.citations import BU_2023_CONVERGENCE, DE_2022, XIAO_2023
from clipwise.models.accompanied import Accompanied
from clipwise.models.citations import (
    CHO_2014,
    DOSOVITSKIY_2021,
    HE_2016,
    HOCHREITER_1997,
    KLAUSE_2022,
    RADFORD_2019,
    TRAMER_2021,
    VASWANI_2017,
    YOUSEFPOUR_2021,
)
from clipwise.models.cnn import cifar_cnn, cifar_tutorial, digits_cnn, mnist_cnn, opacus_mnist
from clipwise.models.gru import gru, gru_enhanced
from clipwise.models.hugging_face import gpt2_small, vit_small
from clipwise.models.lstm import lstm_classifier
from clipwise.models.mlp import mlp
from clipwise.models.network import Network, Standard, exactly, flattened, images, sequence, sized_sequence, square
from clipwise.models.resnet import BLOCKS, resnet20_bn, resnet20_enhanced, resnet20_gn, resnet_enhanced, resnet_gn
from clipwise.models.resnet9 import resnet9
from clipwise.models.scattering import scattering_cnn, scattering_linear, scattering_mnist_cnn, transformable
from clipwise.models.standardise import StandardisedConv2d
from clipwise.models.transformer import small_transformer
from clipwise.models.wide_resnet import wrn_16_4, wrn_40_4
from clipwise.types import InputError, one_of, whole

__all__ = [
    "MODELS",
    "Accompanied",
    "Listed",
    "Network",
    "StandardisedConv2d",
    "build",
    "cifar_cnn",
    "cifar_tutorial",
    "digits_cnn",
    "gpt2_small",
    "gru",
    "gru_enhanced",
    "list",
    "lstm_classifier",
    "mlp",
    "mnist_cnn",
    "opacus_mnist",
    "resnet9",
    "resnet20_bn",
    "resnet20_enhanced",
    "resnet20_gn",
    "resnet_enhanced",
    "resnet_gn",
    "scattering_cnn",
    "scattering_linear",
    "scattering_mnist_cnn",
    "small_transformer",
    "takes_tokens",
    "vit_small",
    "wrn_16_4",
    "wrn_40_4",
]

_IMAGES = "(channels, height, width)"
_SCATTERED = f"{_IMAGES} with sides in multiples of 4 from 8, or (81 for each colour, height, width) made beforehand"
_DIGITS = Standard("digits", (1, 8, 8), 10)
_MNIST = Standard("MNIST", (1, 28, 28), 10)
_CIFAR = Standard("CIFAR-10", (3, 32, 32), 10)
_LARGE = Standard("CIFAR-10 at 224", (3, 224, 224), 10)
_IMDB = Standard("IMDb", (128,), 2, vocabulary=10_000)
_GPT2 = Standard("GPT-2 tokens", (128,), 2, vocabulary=50_257)

# depth → parameters on CIFAR-10: as published with GroupNorm, and with enhanced normalisation
_RESNETS = {
    14: (172_506, 173_498),
    20: (269_722, 270_266),
    22: (288_282, 288_698),
    26: (366_938, 367_034),
    32: (464_154, 463_802),
    44: (658_586, 657_338),
    56: (853_018, 850_874),
}

MODELS: dict[str, Network] = {
    "mlp": Network(mlp, "(side, ...)", flattened, _DIGITS, 4_810),
    "digits_cnn": Network(digits_cnn, "(1, 8, 8)", exactly(1, 8, 8), _DIGITS, 2_762),
    "mnist_cnn": Network(mnist_cnn, "(1, 28, 28)", exactly(1, 28, 28), _MNIST, 26_010, TRAMER_2021),
    "opacus_mnist": Network(opacus_mnist, "(1, 28, 28)", exactly(1, 28, 28), _MNIST, 26_010, YOUSEFPOUR_2021),
    "scattering_mnist_cnn": Network(scattering_mnist_cnn, _SCATTERED, transformable, _MNIST, 33_066, TRAMER_2021),
    "cifar_tutorial": Network(cifar_tutorial, "(3, 32, 32)", exactly(3, 32, 32), _CIFAR, 62_006, BU_2023_CONVERGENCE),
    "cifar_cnn": Network(cifar_cnn, "(3, 32, 32)", exactly(3, 32, 32), _CIFAR, 550_570, TRAMER_2021),
    "scattering_linear": Network(scattering_linear, _SCATTERED, transformable, _CIFAR, 155_530, TRAMER_2021),
    "scattering_cnn": Network(scattering_cnn, _SCATTERED, transformable, _CIFAR, 187_210, TRAMER_2021),
    **{
        f"resnet{depth}_gn": Network(partial(resnet_gn, BLOCKS[depth]), _IMAGES, images(1), _CIFAR, published, HE_2016)
        for depth, (published, _) in _RESNETS.items()
    },
    **{
        f"resnet{depth}_enhanced": Network(
            partial(resnet_enhanced, BLOCKS[depth]), _IMAGES, images(1), _CIFAR, enhanced, XIAO_2023
        )
        for depth, (_, enhanced) in _RESNETS.items()
    },
    "resnet20_bn": Network(resnet20_bn, _IMAGES, images(1), _CIFAR, 269_722, HE_2016),
    "resnet9": Network(resnet9, f"{_IMAGES} with sides from 8", images(8), _CIFAR, 2_448_714, KLAUSE_2022),
    "wrn_16_4": Network(wrn_16_4, _IMAGES, images(1), _CIFAR, 2_753_818, DE_2022),
    "wrn_40_4": Network(wrn_40_4, _IMAGES, images(1), _CIFAR, 8_961_306, DE_2022),
    "vit_small": Network(vit_small, "(channels, side, side)", square, _LARGE, 21_669_514, DOSOVITSKIY_2021),
    "gru": Network(gru, "(tokens,)", sequence, _IMDB, 32_002, CHO_2014),
    "gru_enhanced": Network(gru_enhanced, "(tokens,)", sequence, _IMDB, 32_002, XIAO_2023),
    "lstm_classifier": Network(lstm_classifier, "(tokens,)", sequence, _IMDB, 1_118_018, HOCHREITER_1997),
    "small_transformer": Network(small_transformer, "(tokens,)", sized_sequence, _IMDB, 1_693_186, VASWANI_2017),
    "gpt2_small": Network(gpt2_small, "(tokens,)", sized_sequence, _GPT2, 124_441_346, RADFORD_2019),
}


def build(
    name: str, shape: Sequence[int], classes: int, vocabulary: int | None = None, task: str = "classes"
) -> nn.Module:
    """The model called ``name`` for samples of ``shape`` (without the batch), e.g. ``(1, 8, 8)`` or ``(tokens,)``.

    ``name`` may carry options of the network, as in ``mlp(hidden=32)``. The output is [n, classes]; for the task
    "regression" it is [n, 1], and ``classes`` is 1.

    *Edge cases*: a shape that the model cannot take is an InputError; models of tokens also need ``vocabulary``.
    """
    name, options = _asked(name)
    network = MODELS[name]
    if one_of("task", task, ("classes", "regression")) == "classes":
        whole("classes", classes, least=2)
    elif classes != 1:
        raise InputError(f"a regression has one output, got classes={classes}: write classes=1")
    sides = tuple(whole("shape", side) for side in shape)
    sizes = network.fit(sides)
    # most networks for images would take any order of the sides, and learn little
    turn = "" if network.data.vocabulary else channels_first(sides)
    if sizes is None or ("channels" in sizes and turn):
        raise InputError(
            f"{name} takes samples of shape {network.takes}, got {sides}: "
            f"{f'{turn}, or ' if turn else ''}write another model, e.g. mlp"
        )
    if network.data.vocabulary is not None:
        if vocabulary is None:
            raise InputError(f"{name} needs the number of different tokens: write vocabulary=...")
        sizes = {"vocabulary": whole("vocabulary", vocabulary), **sizes}
    known = [key for key in inspect.signature(network.make).parameters if key not in {*sizes, "classes"}]
    for option in options:
        if not known:
            raise InputError(f"{name} has no options, got {option}: write {name}")
        one_of(f"option of {name}", option, known)
    try:
        return network.make(classes=classes, **sizes, **options)
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        if not options:
            raise
        raise InputError(f"{name} refuses its options ({' '.join(str(error).split())}): write {name} alone") from error


def takes_tokens(name: str) -> bool:
    """Whether the model's samples are tokens (whole numbers) rather than images or other numbers."""
    return MODELS[_asked(name)[0]].data.vocabulary is not None


def _asked(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of ``name`` or ``name(option=value, ...)``."""
    if "(" not in text:
        return one_of("model", text, MODELS), {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
            raise ValueError
        options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except (SyntaxError, ValueError):
        raise InputError(f"expected a model such as mlp or mlp(hidden=32), got {text!r}") from None
    return one_of("model", call.func.id, MODELS), options


@dataclass(frozen=True)
class Listed:
    """One line of the table of networks; the shape and the size are those for ``data``."""

    name: str
    parameters: int
    shape: tuple[int, ...]
    data: str
    paper: str  # empty where there is none


def list() -> tuple[Listed, ...]:  # noqa: A001 (models.list() says what it gives)
    """The networks, in the order of MODELS."""
    return tuple(
        Listed(
            name,
            network.parameters,
            network.data.shape,
            network.data.name,
            f"{network.paper.authors.split(',')[0]} {network.paper.year}" if network.paper else "",
        )
        for name, network in MODELS.items()
    )
