"""Text as tokens, by a rule that was fixed before any text was seen.

Receives: texts.
Gives: tokens [n, tokens], int64: hashed words, filled up in front with zeros; and the IMDb reviews from their folder.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from clipwise.data.datasets import Arrays
from clipwise.data.source import Layout, Source, folder_with
from clipwise.data.splits import Splits, shuffled
from clipwise.types import InputError

PADDING, BREAK = 0, 1  # BREAK stands between two texts that belong to one sample; words begin at 2
VOCABULARY, TOKENS = 10_000, 128
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[!?]")  # letters and digits, an apostrophe within a word, two loud signs


def tokenised(texts: Iterable[Sequence[str]], vocabulary: int, tokens: int) -> Tensor:
    """[n, tokens]: the first words of each sample, one or several texts, as numbers 0 … vocabulary − 1.

    A word, in small letters, is 2 + CRC-32 of its UTF-8 bytes modulo vocabulary − 2: no list of words is made from the
    data, since which words occur is itself private. Different words may share a number. Samples that are shorter stand
    at the end of their row, so that a recurrent network's last state has just read a word.
    """
    known: dict[str, int] = {}
    out: list[list[int]] = []
    for sample in texts:
        row: list[int] = []
        for text in sample:
            row += [BREAK] if row else []
            for match in _WORD.finditer(text.lower()):
                if len(row) >= tokens:
                    break
                word = match[0]
                number = known.get(word)
                if number is None:
                    number = known[word] = 2 + zlib.crc32(word.encode("utf-8", "replace")) % (vocabulary - 2)
                row.append(number)
        row = row[:tokens]
        out.append([PADDING] * (tokens - len(row)) + row)
    return torch.tensor(out, dtype=torch.long).view(-1, tokens)


def sizes(source: Source) -> tuple[int, int]:
    """``vocabulary`` and ``tokens`` of the data's text."""
    return source.number("vocabulary", VOCABULARY, least=3), source.number("tokens", TOKENS)


def imdb(source: Source) -> Splits:
    """The Large Movie Review Dataset: 0 is negative, 1 positive; the rows are in a fixed shuffled order."""
    home = "'Large Movie Review Dataset v1.0', ai.stanford.edu/~amaas/data/sentiment"
    folders = tuple(f"{part}/{kind}" for part in ("train", "test") for kind in ("neg", "pos"))
    if source.path.is_file():
        kind = "jsonl" if source.path.suffix == ".jsonl" else "csv"
        raise InputError(
            f"imdb reads folders of reviews, and {source.path.absolute()} is a file: write '{kind}:{source.path}"
            "?text=review&label=sentiment:negative|positive', with its own columns and labels"
        )
    _, folder = folder_with(source, [Layout(folders, ("", "aclImdb"))], home)
    vocabulary, tokens = sizes(source)

    def part(name: str) -> Arrays:
        files = [sorted((folder / name / kind).glob("*.txt")) for kind in ("neg", "pos")]
        if not all(files):
            raise InputError(
                f"imdb must have .txt files in {folder / name}/neg and …/pos, got none: get them from {home}"
            )
        labels = torch.tensor([label for label in (0, 1) for _ in files[label]])
        reviews = (
            (path.read_text(encoding="utf-8", errors="replace").replace("<br />", " "),)
            for kind in files
            for path in kind
        )
        # the files come sorted by label; in this order the first rows are of both
        return Arrays((tokenised(reviews, vocabulary, tokens), labels)).take(shuffled(len(labels)))

    return Splits(source.text, part("train"), part("test"), 2, (tokens,), vocabulary=vocabulary)
