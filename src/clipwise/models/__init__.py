"""The networks that clipwise trains by name, one file per family.

Receives: a name, the shape of one sample, the number of classes.
Gives: MODELS (name → factory) and build, which fits a factory to the data or says what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from clipwise.models.cnn import digits_cnn, mnist_cnn
from clipwise.models.lstm import lstm_classifier
from clipwise.models.mlp import mlp
from clipwise.models.resnet import resnet20_gn
from clipwise.models.transformer import small_transformer
from clipwise.types import InputError, one_of, whole

__all__ = ["MODELS", "build", "digits_cnn", "lstm_classifier", "mlp", "mnist_cnn", "resnet20_gn", "small_transformer"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits_cnn": digits_cnn,
    "lstm_classifier": lstm_classifier,
    "mlp": mlp,
    "mnist_cnn": mnist_cnn,
    "resnet20_gn": resnet20_gn,
    "small_transformer": small_transformer,
}


def build(name: str, shape: Sequence[int], classes: int, vocabulary: int | None = None) -> nn.Module:
    """The model called ``name`` for samples of ``shape`` (without the batch), e.g. ``(1, 8, 8)`` or ``(tokens,)``.

    *Edge cases*: a shape that the model cannot take is an InputError; models of tokens also need ``vocabulary``.
    """
    factory = MODELS[one_of("model", name, MODELS)]
    whole("classes", classes, least=2)
    sides = tuple(whole("shape", side) for side in shape)
    match name, sides:
        case "mlp", (_, *_):
            return factory(inputs=math.prod(sides), classes=classes)
        case ("mnist_cnn", (1, 28, 28)) | ("digits_cnn", (1, 8, 8)):
            return factory(classes=classes)
        case "resnet20_gn", (channels, _, _):
            return factory(classes=classes, channels=channels)
        case (("small_transformer" | "lstm_classifier"), (length,)):
            if vocabulary is None:
                raise InputError(f"{name} needs the number of different tokens: write vocabulary=...")
            sizes = {"length": length} if name == "small_transformer" else {}
            return factory(vocabulary=whole("vocabulary", vocabulary), classes=classes, **sizes)
    channel = "give them a channel by x[:, None], or " if len(sides) == 2 else ""
    raise InputError(
        f"{name} takes samples of shape {_SHAPES[name]}, got {sides}: {channel}write another model, e.g. mlp"
    )


_SHAPES = {
    "digits_cnn": "(1, 8, 8)",
    "lstm_classifier": "(tokens,)",
    "mlp": "(side, ...)",
    "mnist_cnn": "(1, 28, 28)",
    "resnet20_gn": "(channels, height, width)",
    "small_transformer": "(tokens,)",
}
