"""Transformers that the package ``transformers`` builds; it is asked for only when one of them is.

Receives: sizes, and perhaps the folder of a checkpoint.
Gives: vit_small, ViT-small with patches of 16×16 pixels, and gpt2_small, a classifier of the shape of GPT-2 small.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.types import InputError

PATCH = 16


class _Images(nn.Module):
    """A vision transformer as a function of images alone, which are enlarged first to the side that it takes."""

    def __init__(self, body: nn.Module, side: int) -> None:
        super().__init__()
        self.body, self.side = body, side

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.side:
            images = F.interpolate(images, size=(self.side, self.side), mode="bicubic", align_corners=False)
        logits: Tensor = self.body(pixel_values=images).logits
        return logits


class _Tokens(nn.Module):
    """A language model's body, and a linear head on the last position, which sees all others."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(input_ids=tokens, use_cache=False).last_hidden_state[:, -1])
        return logits


def vit_small(
    side: int,
    channels: int = 3,
    classes: int = 10,
    image: int | None = None,
    depth: int = 12,
    checkpoint: str | None = None,
) -> nn.Module:
    """ViT-small/16: 21 669 514 parameters with ten classes, for images of 224×224.

    ``image``: the side that images are enlarged to, such as 224; ``checkpoint``: a folder in the format of
    transformers, whose head is replaced where it has another number of classes.
    """
    library = _library("vit_small")
    side = side if image is None else image
    if side % PATCH:
        raise InputError(
            f"vit_small takes images whose side is a multiple of {PATCH}, got {side}: write vit_small(image=224)"
        )
    if checkpoint is not None:
        body = _loaded(library.ViTForImageClassification, checkpoint, num_labels=classes, ignore_mismatched_sizes=True)
        if body.config.image_size != side:
            raise InputError(
                f"the checkpoint in {checkpoint} takes images of side {body.config.image_size}, got {side}: "
                f"write vit_small(image={body.config.image_size}, ...)"
            )
    else:
        config = library.ViTConfig(
            hidden_size=384,
            num_hidden_layers=depth,
            num_attention_heads=6,
            intermediate_size=4 * 384,
            image_size=side,
            patch_size=PATCH,
            num_channels=channels,
            num_labels=classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        body = library.ViTForImageClassification(config)
    return _Images(body, side)


def gpt2_small(
    vocabulary: int, length: int, classes: int = 2, depth: int = 12, checkpoint: str | None = None
) -> nn.Module:
    """A classifier of the shape of GPT-2 small: 124 439 808 parameters in the body for its 50 257 tokens.

    It has 1024 positions, or ``length`` where samples are longer. ``checkpoint``: a folder in the format of
    transformers, for data with its tokens. Dropout is 0, because noise is regularisation enough.
    """
    library = _library("gpt2_small")
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if checkpoint is not None:
        body = _loaded(library.GPT2Model, checkpoint, **still)
        if body.config.vocab_size < vocabulary or body.config.n_positions < length:
            raise InputError(
                f"the checkpoint in {checkpoint} takes {body.config.n_positions} tokens of {body.config.vocab_size} "
                f"kinds, got {length} of {vocabulary}: tokenise the data as it expects"
            )
    else:
        config = library.GPT2Config(
            vocab_size=vocabulary,
            n_positions=max(1024, length),
            n_layer=depth,
            bos_token_id=None,
            eos_token_id=None,
            **still,
        )
        body = library.GPT2Model(config)
    return _Tokens(body, body.config.n_embd, classes)


def _library(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(f"{name} needs the package transformers ({error}): write pip install transformers") from error


def _loaded(kind: Any, folder: str, **options: Any) -> Any:
    """A checkpoint from this machine; nothing is downloaded."""
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise InputError(f"expected a checkpoint in {folder}, got no config.json there: write the folder's name")
    try:
        return kind.from_pretrained(Path(folder).expanduser(), local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot read the checkpoint in {folder}: {' '.join(str(error).split())}") from error
