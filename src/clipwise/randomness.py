"""Random numbers: secure ones for private runs, seeded ones for tests.

Receives: a shape or a count; for the seeded stream also a seed and a step.
Gives: standard normals and uniforms, float64 on the CPU; noise added to CUDA tensors, on their own device.

Both streams read ChaCha20 (RFC 8439) and share everything after it; they differ only in where the key comes from.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
        """(value + scale · z)/divisor for CUDA tensors, each with its own scale and normals, drawn where it is.

        In float64, rounded once: to ``dtype``, or the tensor's own format.
        """
        ...

    def at(self, step: int) -> Stream:
        """The stream that this step draws from: ask once per step, since asking again may start it anew."""
        ...


def keystream(key: bytes, nonce: bytes, into: memoryview) -> None:
    """Write the ChaCha20 keystream over ``into``; ``nonce`` is a 4-byte block counter, then 12 bytes, little endian."""
    Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update_into(_ZEROS[: len(into)], into)


def add_scaled(value: Tensor, normals: Tensor, scale: float, divisor: float, dtype: torch.dtype | None) -> Tensor:
    """(``value`` + scale · normals)/divisor in float64 on the CPU, rounded once; overwrites ``normals``."""
    normals = normals.view(value.shape)
    total = torch.add(value.to("cpu"), normals, alpha=scale, out=normals)
    return (total if divisor == 1 else total.div_(divisor)).to(value.device, dtype or value.dtype)


def _empty(count: int) -> Tensor:
    """Float64 on the CPU, whatever device is the default: the cipher writes to this machine's memory."""
    return torch.empty(count, dtype=torch.float64, device="cpu")


def _split(out: Tensor, size: int) -> list[NDArray[np.float64]]:
    """Its memory in pieces of at most that size."""
    flat: NDArray[np.float64] = out.numpy()
    return [flat[at : at + size] for at in range(0, len(flat), size)]


def _single(out: NDArray[np.float64], start: tuple[bytes, bytes]) -> None:
    """As many normals, each from one Box–Muller draw, over ``out``: five 32-bit words make two.

    r = √(−2 ln u) with u = word · 2⁻⁶³ + (more + ½) · 2⁻⁹⁵, which is never 0.
    """
    half, rest = (len(out) + 1) // 2, len(out) // 2
    room = np.empty(20 * half, np.uint8)
    keystream(*start, room.data)
    word, turn = room[: 16 * half].view(np.int64).reshape(2, half)
    word &= (1 << 63) - 1
    radius = np.multiply(room[16 * half :].view(np.uint32), 2.0**-95)
    radius += 2.0**-96
    radius += word * 2.0**-63
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = np.multiply(turn, 2 * math.pi * 2.0**-64)
    cosines, sines = (_by_tangent if _fast_tangent() else _by_both)(angle[None], radius[None])
    out[:half], out[half:] = cosines[0], sines[0, :rest]


def _words(count: int, key: bytes, nonce: bytes) -> NDArray[np.int64]:
    """At most one block of the keystream as signed 64-bit words."""
    words = np.empty(count, np.int64)
    keystream(key, nonce, words.data.cast("B"))
    return words


def _normals(out: NDArray[np.float64], start: tuple[bytes, bytes]) -> None:
    """Half a block at most: (z + z′)/√2 with z and z′ from two Box–Muller pairs, over ``out``."""
    half, rest = (len(out) + 1) // 2, len(out) // 2
    u, v = _words(4 * half, *start).reshape(2, 2, half)  # [pair, output]
    # r/√2 = √(−ln(1 − u)), where u = (word & MASK)·2⁻⁵³: 1 − u is exact and never 0, so that the logarithm is finite
    u |= ~_MASK
    radius: NDArray[np.float64] = np.multiply(u, -(2.0**-53))
    np.log(radius, out=radius)
    np.negative(radius, out=radius)
    np.sqrt(radius, out=radius)
    angle: NDArray[np.float64] = np.multiply(v, 2 * math.pi * 2.0**-64)  # from all bits of the word, −π to π
    cosines, sines = (_by_tangent if _fast_tangent() else _by_both)(angle, radius)
    np.add(cosines[0], cosines[1], out=out[:half])
    np.add(sines[0, :rest], sines[1, :rest], out=out[half:])


@functools.cache
def _fast_tangent() -> bool:
    """Whether NumPy's tangent takes several numbers at a time, as it does with AVX-512; it says so since 2.1."""
    try:
        from numpy.lib.introspect import opt_func_info
    except ImportError:
        return False
    found = opt_func_info(func_name="^tan$", signature="float64").get("tan", {})
    return any(not kind["current"].startswith("baseline") for kind in found.values())


def _by_tangent(angle: NDArray[np.float64], radius: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """r cos θ and r sin θ; with t = tan(θ/2) they are r (1 − t²)/(1 + t²) and r 2t/(1 + t²). Overwrites both."""
    angle *= 0.5
    t = np.tan(angle, out=angle)
    square = t * t
    radius /= square + 1
    cosines = np.subtract(1, square, out=square)
    cosines *= radius
    t *= radius
    t *= 2
    return cosines, t


def _by_both(angle: NDArray[np.float64], radius: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """The same by PyTorch's cosine and sine. A row is so short that PyTorch starts no threads of its own for it."""
    sines = np.empty_like(angle)
    for one, sine in zip(map(torch.from_numpy, angle), map(torch.from_numpy, sines), strict=True):
        torch.sin(one, out=sine)
        one.cos_()
    angle *= radius
    sines *= radius
    return angle, sines


class _ChaCha20(ABC):
    """Uniforms and normals from ChaCha20, a new key or nonce for every block.

    A block is far shorter than the 256 GiB after which ChaCha20's counter wraps around.
    """

    @abstractmethod
    def _next(self, use: int) -> tuple[bytes, bytes]:
        """Key and nonce that no other block or CUDA tensor has; ``use`` tells apart what they are for."""

    def uniform(self, count: int) -> Tensor:
        """Independent uniforms in [0, 1), float64: multiples of 2⁻⁵³."""
        out = _empty(whole("count", count, least=0))
        for block in _split(out, _BLOCK):
            np.multiply(_words(len(block), *self._next(use=0)) & _MASK, 2.0**-53, out=block)
        return out

    def seed(self) -> int:
        """63 bits, for generators that are no streams."""
        return int(_words(1, *self._next(use=3))[0]) & ((1 << 63) - 1)

    def normal(self, shape: Sequence[int], narrow: bool = False) -> Tensor:
        """Independent standard normals, float64; ``narrow``: what they are added to is then rounded to float32.

        Many of them are drawn in threads, as PyTorch has.
        """
        out, draw = _empty(math.prod(shape)), _single if narrow else _normals
        blocks = _split(out, _BLOCK // 2)
        starts = [self._next(use=1) for _ in blocks]  # in order, whichever thread comes to them
        threads = min(torch.get_num_threads(), _THREADS, len(blocks) // _EACH)
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:  # none is left behind, which a fork would miss
                list(pool.map(draw, blocks, starts))
        else:
            for block, start in zip(blocks, starts, strict=True):
                draw(block, start)
        return out.view(tuple(shape))

    def noisy_all(
        self, values: Sequence[Tensor], scales: Sequence[float], divisor: float = 1.0, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """(value + scale · z)/divisor for CUDA tensors: those on one device and of one format by one launch."""
        out = list(values)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, value in enumerate(values):
            kinds.setdefault((value.device, value.dtype), []).append(i)
        for places in kinds.values():
            key, nonce = self._next(use=2)
            number = int.from_bytes(nonce[4:], "little")
            some, own = [values[i] for i in places], [scales[i] for i in places]
            for i, value in zip(places, gpu_noise.noisy_all(some, own, key, number, divisor, dtype), strict=True):
                out[i] = value
        return out


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
