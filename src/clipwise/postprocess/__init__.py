"""What is done with a released gradient before the optimizer sees it. It is free: it reads released values only.

Receives: the released mean gradient, the noise's standard deviation (public), and the filter's own state.
Gives: Post, a frozen value such as ``heavy_ball(0.9)``; ``chain`` joins several; POSTS maps names to factories.
"""

from clipwise.methods import called
from clipwise.postprocess.filters import adam_bc, average, heavy_ball, low_pass, outer_momentum
from clipwise.postprocess.post import Post, chain, identity

POSTS = {factory.__name__: factory for factory in (identity, outer_momentum, heavy_ball, average, low_pass, adam_bc)}


def parse(text: str) -> Post:
    """The post-processing that an expression names; several are separated by '|', applied from left to right."""
    return chain(*(_one(part) for part in text.split("|")))


def _one(text: str) -> Post:
    made = called(text, POSTS, "post-processing", "heavy_ball(0.9)")
    assert isinstance(made, Post)
    return made


__all__ = [
    "POSTS",
    "Post",
    "adam_bc",
    "average",
    "chain",
    "heavy_ball",
    "identity",
    "low_pass",
    "outer_momentum",
    "parse",
]
