"""Gated recurrent networks over frozen word vectors.

Receives: the number of different tokens; a file of word vectors, or a seed for random ones.
Gives: gru, one nn.GRU and a linear head; gru_enhanced, the same with every pre-activation standardised (Xiao et al.).

Word vectors are data: they enter as a buffer, are never trained, and cost no privacy as long as they are public.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipwise.data.text import PADDING, tokenised
from clipwise.models.standardise import Coordinates
from clipwise.types import InputError, whole

WIDTH, HIDDEN = 100, 64


class _Vectors(nn.Module):
    """The vector of each token, from a table that is not trained."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


class _LastState(nn.Module):
    """One nn.GRU; of its states, the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, batch_first=True)

    def forward(self, vectors: Tensor) -> Tensor:
        states: Tensor = self.gru(vectors)[0]
        return states[:, -1]


class _EnhancedLastState(nn.Module):
    """A GRU whose two maps' outputs are standardised over their coordinates before they become gates."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, 3 * HIDDEN)
        self.state = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.standardised = Coordinates(3 * HIDDEN)

    def forward(self, vectors: Tensor) -> Tensor:
        ahead = self.standardised(self.input(vectors))  # of all steps at once: [sample, step, 3 · HIDDEN]
        state = vectors.new_zeros(len(vectors), HIDDEN)
        for step in ahead.unbind(1):
            (xr, xz, xn), (hr, hz, hn) = step.chunk(3, 1), self.standardised(self.state(state)).chunk(3, 1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            n = torch.tanh(xn + r * hn)
            state = (1 - z) * n + z * state
        return state


def gru(vocabulary: int, classes: int = 2, vectors: str | None = None, vector_seed: int = 0) -> nn.Module:
    """A GRU of 64 units over frozen vectors of 100 numbers: 32 002 parameters with two classes.

    ``vectors``: a NumPy file [vocabulary, 100], row i for token i, or a text file in the format of GloVe, for tokens
    made by ``clipwise.data``; without one they are random, the same for a ``vector_seed``.
    """
    return nn.Sequential(_vectors(vocabulary, vectors, vector_seed), _LastState(), nn.Linear(HIDDEN, classes))


def gru_enhanced(vocabulary: int, classes: int = 2, vectors: str | None = None, vector_seed: int = 0) -> nn.Module:
    """Xiao et al.'s normalisation-enhanced GRU, with the same sizes and choices as gru."""
    return nn.Sequential(_vectors(vocabulary, vectors, vector_seed), _EnhancedLastState(), nn.Linear(HIDDEN, classes))


def _vectors(vocabulary: int, file: str | None, seed: int) -> _Vectors:
    if file is not None:
        return _Vectors(_read(Path(file).expanduser(), vocabulary))
    # a generator of its own: the vectors are part of the network, not of a run's initial weights
    generator = torch.Generator().manual_seed(whole("vector_seed", seed, least=0))
    table = torch.randn(vocabulary, WIDTH, generator=generator, device="cpu")
    table[PADDING] = 0
    return _Vectors(table)


def _read(path: Path, vocabulary: int) -> Tensor:
    try:
        table = _rows(path, vocabulary) if path.suffix == ".npy" else _words(path, vocabulary)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read word vectors from {path} ({' '.join(str(error).split())}): give a .npy file, or a text file "
            "in the format of GloVe"
        ) from error
    return torch.from_numpy(table).to(torch.get_default_dtype())


def _words(path: Path, vocabulary: int) -> NDArray[np.float64]:
    """Lines of a word and its numbers. Of the words that share a token the first counts, as they go by frequency."""
    table, seen = np.zeros((whole("vocabulary", vocabulary, least=3), WIDTH)), {PADDING}
    with path.open(encoding="utf-8") as lines:
        tokens = tokenised(((line.partition(" ")[0],) for line in lines), vocabulary, 2).tolist()
    with path.open(encoding="utf-8") as lines:
        for number, (line, (before, token)) in enumerate(zip(lines, tokens, strict=True), start=1):
            if token in seen or before != PADDING:  # what is several words to the tokeniser is never looked up
                continue
            seen.add(token)
            table[token] = _numbers(line, f"line {number} of {path}")
    return table


def _numbers(line: str, where: str) -> NDArray[np.float64]:
    try:
        numbers = np.array(line.split()[1:], dtype=np.float64)
    except ValueError:
        numbers = np.empty(0)
    if numbers.shape != (WIDTH,) or not np.isfinite(numbers).all():
        raise InputError(
            f"{where} must hold a word and {WIDTH} numbers, got {line[:40].rstrip()!r}: "
            f"give vectors of {WIDTH} numbers, such as glove.6B.100d.txt"
        )
    return numbers


def _rows(path: Path, vocabulary: int) -> NDArray[np.float64]:
    how = f"write numpy.save(path, vectors) with vectors of shape [{vocabulary}, {WIDTH}], row i for token i"
    try:
        array = np.load(path, allow_pickle=False)  # a pickled object could run code
    except ValueError as error:
        raise InputError(f"cannot read word vectors from {path} ({' '.join(str(error).split())}): {how}") from error
    shape = list(getattr(array, "shape", []))  # an archive of several arrays has none
    if shape != [vocabulary, WIDTH] or not np.issubdtype(array.dtype, np.floating) or not np.isfinite(array).all():
        got = f"shape {shape}" if shape != [vocabulary, WIDTH] else f"NaN, infinities or {array.dtype}"
        raise InputError(f"word vectors must be finite numbers of shape [{vocabulary}, {WIDTH}], got {got}: {how}")
    return np.asarray(array, dtype=np.float64)
