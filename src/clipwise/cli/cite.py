"""``clipwise cite``: what to cite for a method.

Receives: CiteConfig.
Gives: BibTeX, or JSON with the methods that each paper stands for.
"""

from __future__ import annotations

from dataclasses import asdict

from clipwise.config import CiteConfig
from clipwise.methods import METHODS, papers, parse
from clipwise.plain import as_json


def run(config: CiteConfig) -> str:
    """The papers of the methods, each once."""
    found = papers(parse(text) for text in config.methods or METHODS)
    if config.json:
        return as_json([asdict(paper) | {"methods": names} for paper, names in found.items()])
    return "\n".join(f"% {', '.join(names)}\n{paper.bibtex()}\n" for paper, names in found.items())
