"""Random numbers: secure ones for private runs, seeded ones for tests.

Receives: a shape or a count; for the seeded stream also a seed and a step.
Gives: standard normals and uniforms, float64 on the CPU; noise added to tensors, on CUDA where they lie.

Both streams read ChaCha20 (RFC 8439) and share everything after it; they differ only in where the key comes from.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from torch import Tensor

from clipwise import gpu_noise
from clipwise.types import whole

_BLOCK = 1 << 17  # words per key, a megabyte: passes stay in the cache and seldom meet at the interpreter's lock
_ZEROS = memoryview(bytes(8 * _BLOCK))
_MASK = (1 << 53) - 1  # a float64 holds 53 random bits
_THREADS = 8  # at most: between their passes threads wait for the interpreter's lock
_EACH = 32  # blocks for each thread, two million normals: with fewer, PyTorch's own spinning threads cost more


class Stream(Protocol):
    """Where random numbers come from; ``name`` is what a report says about them."""

    @property
    def name(self) -> str:
        """The generator, as a run's statement names it."""
        ...

    def normal(self, shape: Sequence[int], narrow: bool = False) -> Tensor:
        """Independent standard normals, float64; ``narrow``: what they are added to is then rounded to float32."""
        ...

    def uniform(self, count: int) -> Tensor:
        """Independent uniforms in [0, 1), float64: multiples of 2⁻⁵³."""
        ...

    def seed(self) -> int:
        """63 bits, for generators that are no streams."""
        ...

    def noisy_all(
        self, values: Sequence[Tensor], scales: Sequence[float], divisor: float = 1.0, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """(value + scale · z)/divisor, each value with its own scale and normals; those on CUDA are drawn there.

        In float64, rounded once: to ``dtype``, or the value's own format.
        """
        ...

    def at(self, step: int) -> Stream:
        """The stream that this step draws from: ask once per step, since asking again may start it anew."""
        ...


def keystream(key: bytes, nonce: bytes, into: memoryview) -> None:
    """Write the ChaCha20 keystream over ``into``; ``nonce`` is a 4-byte block counter, then 12 bytes, little endian."""
    Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update_into(_ZEROS[: len(into)], into)


def _pieces(count: int, size: int) -> Iterator[slice]:
    """0 to ``count`` in pieces of at most that size."""
    return (slice(at, min(at + size, count)) for at in range(0, count, size))


def _one_draw(count: int, start: tuple[bytes, bytes]) -> NDArray[np.float64]:
    """Half a block of normals at most, each from one Box–Muller draw: five 32-bit words make two.

    r = √(−2 ln u) with u = word · 2⁻⁶³ + (more + ½) · 2⁻⁹⁵, which is never 0.
    """
    half = (count + 1) // 2
    room = np.empty(20 * half, np.uint8)
    keystream(*start, room.data)
    word, turn = room[: 16 * half].view(np.int64).reshape(2, half)
    word &= (1 << 63) - 1
    waves = np.empty((2, half))  # radius and angle become r cos θ and r sin θ
    radius, angle = waves
    np.multiply(word, 2.0**-63, out=angle)
    np.multiply(room[16 * half :].view(np.uint32), 2.0**-95, out=radius)
    radius += 2.0**-96
    radius += angle
    _log(radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    np.multiply(turn, 2 * math.pi * 2.0**-64, out=angle)
    _to_waves(radius, angle)
    return waves.reshape(-1)[:count]


def _words(count: int, key: bytes, nonce: bytes) -> NDArray[np.int64]:
    """At most one block of the keystream as signed 64-bit words."""
    words = np.empty(count, np.int64)
    keystream(key, nonce, words.data.cast("B"))
    return words


def _two_draws(count: int, start: tuple[bytes, bytes]) -> NDArray[np.float64]:
    """Half a block of normals at most: (z + z′)/√2 with z and z′ from two Box–Muller pairs."""
    half = (count + 1) // 2
    waves = np.empty((2, 2, half))  # [pair, radius or angle, output]
    for one, u, v in zip(waves, *_words(4 * half, *start).reshape(2, 2, half), strict=True):
        # r/√2 = √(−ln(1 − u)), where u = (word & MASK)·2⁻⁵³: 1 − u is exact and never 0: the logarithm is finite
        u |= ~_MASK
        radius, angle = one
        np.multiply(u, -(2.0**-53), out=radius)
        _log(radius)
        np.negative(radius, out=radius)
        np.sqrt(radius, out=radius)
        np.multiply(v, 2 * math.pi * 2.0**-64, out=angle)  # from all bits of the word, −π to π
        _to_waves(radius, angle)
    return np.add(*waves).reshape(-1)[:count]


@functools.cache
def _fast(name: str) -> bool:
    """Whether this function of NumPy takes several float64 at a time, as with AVX-512; it says so since 2.1."""
    try:
        from numpy.lib.introspect import opt_func_info
    except ImportError:
        return False
    found = opt_func_info(func_name=f"^{name}$", signature="float64").get(name, {})
    return any(not kind["current"].startswith("baseline") for kind in found.values())


def _log(values: NDArray[np.float64]) -> None:
    """In place, by PyTorch where that is faster: there are so few that it starts no threads of its own for them."""
    if _fast("log"):
        np.log(values, out=values)
    else:
        torch.from_numpy(values).log_()


def _to_waves(radius: NDArray[np.float64], angle: NDArray[np.float64]) -> None:
    """r cos θ over the radius, r sin θ over the angle."""
    if _fast("tan"):  # with t = tan(θ/2) they are r (1 − t²)/(1 + t²) and r 2t/(1 + t²)
        angle *= 0.5
        t = np.tan(angle, out=angle)
        square = t * t
        radius /= square + 1
        t *= radius
        t *= 2
        radius *= np.subtract(1, square, out=square)
    else:
        cosine = torch.from_numpy(angle).cos().numpy()
        torch.from_numpy(angle).sin_()
        angle *= radius
        radius *= cosine


class _ChaCha20(ABC):
    """Uniforms and normals from ChaCha20, a new key or nonce for every block.

    A block is far shorter than the 256 GiB after which ChaCha20's counter wraps around.
    """

    @abstractmethod
    def _next(self, use: int) -> tuple[bytes, bytes]:
        """Key and nonce that no other block or CUDA tensor has; ``use`` tells apart what they are for."""

    def uniform(self, count: int) -> Tensor:
        """Independent uniforms in [0, 1), float64: multiples of 2⁻⁵³."""
        out = np.empty(whole("count", count, least=0))
        for piece in _pieces(count, _BLOCK):
            np.multiply(_words(len(out[piece]), *self._next(use=0)) & _MASK, 2.0**-53, out=out[piece])
        return torch.from_numpy(out)

    def seed(self) -> int:
        """63 bits, for generators that are no streams."""
        return int(_words(1, *self._next(use=3))[0]) & ((1 << 63) - 1)

    def normal(self, shape: Sequence[int], narrow: bool = False) -> Tensor:
        """Independent standard normals, float64; ``narrow``: what they are added to is then rounded to float32."""
        out = np.empty(math.prod(shape))

        def keep(piece: slice, normals: NDArray[np.float64]) -> None:
            out[piece] = normals

        self._draw(len(out), narrow, keep)
        return torch.from_numpy(out).view(tuple(shape))

    def noisy_all(
        self, values: Sequence[Tensor], scales: Sequence[float], divisor: float = 1.0, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """(value + scale · z)/divisor, each value with its own scale and normals; those on CUDA are drawn there.

        In float64, rounded once: to ``dtype``, or the value's own format. What can share a launch or a draw does.
        """
        kinds: dict[object, list[int]] = {}
        for i, value in enumerate(values):
            kind = (value.device, value.dtype) if value.is_cuda else (dtype or value.dtype)
            kinds.setdefault(kind, []).append(i)
        out = list(values)
        for places in kinds.values():
            some, own = [values[i] for i in places], [scales[i] for i in places]
            if some[0].is_cuda:
                key, nonce = self._next(use=2)
                noisy = gpu_noise.noisy_all(some, own, key, int.from_bytes(nonce[4:], "little"), divisor, dtype)
            else:
                noisy = self._noisy_here(some, own, divisor, dtype or some[0].dtype)
            for i, value in zip(places, noisy, strict=True):
                out[i] = value
        return out

    def _noisy_here(
        self, values: Sequence[Tensor], scales: Sequence[float], divisor: float, dtype: torch.dtype
    ) -> list[Tensor]:
        """On the CPU, all in a row and a block at a time: its normals are added while they lie in the cache."""
        row = torch.cat([value.to("cpu").flatten() for value in values])
        out = torch.empty_like(row, dtype=dtype)
        sizes = [value.numel() for value in values]
        ends = list(itertools.accumulate(sizes))

        def add(piece: slice, normals: NDArray[np.float64]) -> None:
            for scale, size, end in zip(scales, sizes, ends, strict=True):
                if end - size < piece.stop and piece.start < end:
                    normals[max(end - size - piece.start, 0) : end - piece.start] *= scale
            # in halves, which are so short that PyTorch starts no threads of its own for them
            halves = (each.chunk(2) for each in (row[piece], torch.from_numpy(normals), out[piece]))
            for value, noise, noisy in zip(*halves, strict=True):
                noise += value.double()
                noisy.copy_(noise if divisor == 1 else noise.div_(divisor))

        self._draw(len(row), dtype != torch.float64, add)
        return [noisy.view(v.shape).to(v.device) for v, noisy in zip(values, out.split(sizes), strict=True)]

    def _draw(self, count: int, narrow: bool, take: Callable[[slice, NDArray[np.float64]], None]) -> None:
        """Give ``take`` so many standard normals, a block at a time with its place; many in threads, as PyTorch has."""
        draw, pieces = _one_draw if narrow else _two_draws, list(_pieces(count, _BLOCK // 2))
        starts = [self._next(use=1) for _ in pieces]  # in order, whichever thread comes to them

        def one(piece: slice, start: tuple[bytes, bytes]) -> None:
            take(piece, draw(piece.stop - piece.start, start))

        threads = min(torch.get_num_threads(), _THREADS, len(pieces) // _EACH)
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:  # none is left behind, which a fork would miss
                list(pool.map(one, pieces, starts))
        else:
            for piece, start in zip(pieces, starts, strict=True):
                one(piece, start)


class SecureStream(_ChaCha20):
    """Random numbers that nobody can foresee or repeat: every block has a fresh key from the operating system.

    *Guarantees.* Uniforms have 53 random bits. A fork or a copy of the process never repeats a block, because nothing
    is kept between blocks. The work does not depend on the values, so that time tells nothing about the noise (Jin et
    al. 2022 time rejection samplers).

    *Floating point.* The values that float arithmetic can give from one Box–Muller pair are few enough that whoever
    sees secret + noise can tell which secrets are possible (Mironov 2012 for Laplace; Jin et al. 2022 for pairs of
    normals). As Holohan & Braghin (2021) advise, each normal is a sum of independent draws, here two that share no
    pair (the sine and the cosine of one pair add up to a single cosine). Two outputs then hold four uniforms, and
    undoing them means trying 2¹⁰⁶ values of two of these. This doubles the work. It is a defence against known attacks,
    not a proof: the sampler is exact to about 2⁻⁵³, and |z| < 12.13.

    Where secret + noise is rounded to float32 one draw is enough. A pair is one of some 2¹⁰⁶: a radius and an angle, in
    float64. Two results in float32 are one of some 2⁵⁰, so that 2⁵⁶ pairs lead to them from any secret whatever; where
    a result is 2⁻ʲ of the noise's size, which is so with a probability of 2⁻ʲ, 2ʲ times fewer. With 64 bits, radii
    beyond 8 would be further apart than float32 can tell, once in 2⁴⁶; with 95 those beyond 10.4 are: |z| < 11.6.
    """

    name = "chacha20"

    def _next(self, use: int) -> tuple[bytes, bytes]:
        return os.urandom(32), bytes(16)

    def at(self, step: int) -> SecureStream:
        """Itself: no step of a secure stream can be repeated."""
        return self


class SeededStream(_ChaCha20):
    """Random numbers that anyone with the seed can repeat: for tests, never for a release that must stay private.

    *Guarantees.* The same seed and step give the same numbers; steps are independent of each other, and so are the
    uniforms and the normals of one step, in whatever order they are asked for. On CUDA the noise is another, since the
    kernel orders its numbers differently: as the tensor lies in memory, whose order it keeps.
    """

    def __init__(self, seed: int, step: int | None = None) -> None:
        """A stream for the seed, and for one step of it."""
        self.name = f"seeded({whole('seed', seed, least=0)})"
        self._seed = seed
        self._key = hashlib.sha256(f"clipwise seed {seed} step {step}".encode()).digest()
        self._blocks = [0, 0, 0, 0]  # by use: uniforms, normals, noise on CUDA, seeds

    def _next(self, use: int) -> tuple[bytes, bytes]:
        self._blocks[use] += 1
        return self._key, bytes(4) + use.to_bytes(4, "little") + self._blocks[use].to_bytes(8, "little")

    def at(self, step: int) -> SeededStream:
        """The stream of that step, from its beginning: a resumed run repeats it."""
        return SeededStream(self._seed, whole("step", step, least=0))
