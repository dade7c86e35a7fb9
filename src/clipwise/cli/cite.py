"""``clipwise cite``: what to cite for a method.

Receives: CiteConfig.
Gives: BibTeX, or JSON with the methods that each paper stands for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from clipwise.config import CiteConfig
from clipwise.methods import METHODS, Method, parse
from clipwise.types import Citation


def run(config: CiteConfig) -> str:
    """The papers of the methods, each once."""
    papers: dict[Citation, list[str]] = {}
    for text in config.methods or METHODS:
        for method in _used(parse(text)):
            names = papers.setdefault(method.citation, [])
            if method.name not in names:
                names.append(method.name)
    if config.json:
        return json.dumps([asdict(paper) | {"methods": names} for paper, names in papers.items()], indent=2) + "\n"
    return "\n".join(f"% {', '.join(names)}\n{paper.bibtex()}\n" for paper, names in papers.items())


def _used(value: object) -> Iterator[Method]:
    """The method and those it is made of."""
    if isinstance(value, Method):
        yield value
        value = value.settings
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _used(item)
