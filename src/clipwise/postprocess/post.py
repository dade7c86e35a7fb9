"""What post-processing is: a frozen value, whose state goes in and out.

Receives: a released gradient and the state that the last step left.
Gives: Post, and ``chain``, which applies several from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from clipwise.types import Citation, Gradient, InputError

# Tensors in dictionaries, lists and numbers: what a checkpoint can hold. None before the first step.
State: TypeAlias = Any
Apply: TypeAlias = Callable[[State, Gradient, Mapping[str, float]], tuple[State, Gradient]]


@dataclass(frozen=True)
class Post:
    """One filter. ``apply(state, gradient, noise)`` gives the next state and the gradient for the optimizer."""

    text: str  # what ``postprocess.parse`` turns into this again
    apply: Apply
    citation: Citation | None = None  # the paper behind it, where there is one
    chained: tuple[Post, ...] = ()  # those that ``chain`` joined

    @property
    def name(self) -> str:
        """As it is called in an expression."""
        return self.text.partition("(")[0]

    def parts(self) -> Iterator[Post]:
        """This and those it is made of."""
        yield self
        for post in self.chained:
            yield from post.parts()

    def __str__(self) -> str:
        """The expression."""
        return self.text


def identity() -> Post:
    """The released gradient itself."""
    return Post("identity()", lambda state, gradient, noise: (state, gradient))


def chain(*posts: Post) -> Post:
    """One after another, from left to right."""
    if not posts or any(not isinstance(post, Post) for post in posts):
        raise InputError(f"chain takes post-processing such as heavy_ball(0.9), got {posts!r}")
    if len(posts) == 1:
        return posts[0]

    def apply(state: State, gradient: Gradient, noise: Mapping[str, float]) -> tuple[State, Gradient]:
        states = list(state) if state is not None else [None] * len(posts)
        for i, post in enumerate(posts):
            states[i], gradient = post.apply(states[i], gradient, noise)
        return states, gradient

    return Post(" | ".join(post.text for post in posts), apply, chained=posts)
