"""``clipwise cite``: what to cite for a method.

Receives: CiteConfig.
Gives: BibTeX, or JSON with the methods that each paper stands for.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from clipwise.config import CiteConfig
from clipwise.methods import METHODS, papers, parse


def run(config: CiteConfig) -> str:
    """The papers of the methods, each once."""
    found = papers(parse(text) for text in config.methods or METHODS)
    if config.json:
        return json.dumps([asdict(paper) | {"methods": names} for paper, names in found.items()], indent=2) + "\n"
    return "\n".join(f"% {', '.join(names)}\n{paper.bibtex()}\n" for paper, names in found.items())
