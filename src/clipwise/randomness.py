"""Random numbers: secure ones for private runs, seeded ones for tests.

Receives: a shape or a count; for the seeded stream also a seed and a step.
Gives: Stream: standard normals and uniforms, float64 on the CPU; noise added to tensors, on CUDA where they lie;
stream_of, the one that a caller asks for.

All streams read AES-256 in counter mode, on CUDA ChaCha20, and share everything after it; they differ only in where
the key comes from.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from clipwise import cpu_noise, gpu_noise
from clipwise.types import InputError, whole

_BLOCK = 1 << 17  # numbers per key: passes stay in the cache, and are long enough for PyTorch's threads
_ZEROS = memoryview(bytes(16 * _BLOCK))
_MASK = (1 << 53) - 1  # a float64 holds 53 random bits


# The same bytes twice: AES of nonce ‖ 2, nonce ‖ 3, …, as SP 800-38D counts. GCM also adds up a checksum that nobody
# reads, and yet is twice as fast where OpenSSL has written it for a processor's wide AES instructions.
_MODES: tuple[Callable[[bytes], Any], ...] = (modes.GCM, lambda nonce: modes.CTR(nonce + b"\0\0\0\2"))


def keystream(key: bytes, nonce: bytes, into: memoryview) -> None:
    """Write AES-256's keystream over ``into``, for a nonce of 12 bytes."""
    if len(into) > len(_ZEROS):  # what lies beyond would stay as it was, which is not random
        raise ValueError(f"expected at most {len(_ZEROS)} bytes for one key, got {len(into)}")
    _encrypt(_faster(), key, nonce, into)


def _encrypt(mode: Callable[[bytes], Any], key: bytes, nonce: bytes, into: memoryview) -> None:
    Cipher(algorithms.AES256(key), mode(nonce)).encryptor().update_into(_ZEROS[: len(into)], into)


@functools.cache
def _faster() -> Callable[[bytes], Any]:
    """The faster of the two modes on this machine."""

    def seconds(mode: Callable[[bytes], Any]) -> float:
        begin = time.perf_counter()
        _encrypt(mode, bytes(32), bytes(12), room)
        return time.perf_counter() - begin

    room = memoryview(bytearray(1 << 16))
    return min(_MODES, key=lambda mode: min(seconds(mode) for _ in range(5)))


def _words(count: int, start: tuple[bytes, bytes]) -> NDArray[np.int64]:
    """So many 64-bit words of the keystream, a block at most."""
    words = np.empty(count, np.int64)
    keystream(*start, words.data.cast("B"))
    return words


def _one_draw(words: NDArray[np.int32], room: Tensor) -> Tensor:
    """Normals that are one Box–Muller draw each: five 32-bit words make two.

    r = √(−2 ln u) with u = word · 2⁻⁶³ + (more + ½) · 2⁻⁹⁵, which is never 0; an angle is 53 bits, as on a GPU.
    """
    half = len(words) // 5
    word, turn = words[: 4 * half].view(np.int64).reshape(2, half)
    radius, angle, waves = room[0], room[1], room[2:]
    np.multiply(words[4 * half :].view(np.uint32), 2.0**-95, out=radius.numpy())
    radius += 2.0**-96
    radius += angle.copy_(torch.from_numpy(word).bitwise_and_((1 << 63) - 1)).mul_(2.0**-63)
    radius.log_().mul_(-2).sqrt_()
    return _turned(radius, angle.copy_(torch.from_numpy(turn) << 11), waves).view(-1)


def _two_draws(words: NDArray[np.int32], room: Tensor) -> Tensor:
    """Normals (z + z′)/√2, with z and z′ from two Box–Muller pairs: eight 32-bit words make two."""
    word, turn = words.view(np.int64).reshape(2, 2, -1)  # [pair, output]
    radius, angle, waves = room[:2], room[2:4], room[4:].view(2, 2, -1)
    # r/√2 = √(−ln(1 − u)), where u = (word & MASK)·2⁻⁵³: 1 − u is exact and never 0, so that the logarithm is finite
    radius.copy_(torch.from_numpy(word).bitwise_or_(~_MASK)).mul_(-(2.0**-53)).log_().neg_().sqrt_()
    _turned(radius, angle.copy_(torch.from_numpy(turn)), waves)
    return torch.add(waves[:, 0], waves[:, 1], out=radius).view(-1)


def _turned(radius: Tensor, turn: Tensor, waves: Tensor) -> Tensor:
    """r cos θ and r sin θ over ``waves``, where all bits of a word are the angle, −π to π. Overwrites ``turn``."""
    angle = turn.mul_(2 * math.pi * 2.0**-64)
    torch.cos(angle, out=waves[0])
    torch.sin(angle, out=waves[1])
    return waves.mul_(radius)


class Stream(ABC):
    """Uniforms and normals from a cipher, a new key or nonce for every block.

    A block is far shorter than the 64 GiB after which AES's counter wraps around.
    """

    name: str  # the generator, as a run's statement names it

    @abstractmethod
    def _next(self, use: int) -> tuple[bytes, bytes]:
        """Key and nonce that no other block or CUDA tensor has; ``use`` tells apart what they are for."""

    @abstractmethod
    def at(self, step: int) -> Stream:
        """The stream that this step draws from: ask once per step, since asking again may start it anew."""

    def uniform(self, count: int) -> Tensor:
        """Independent uniforms in [0, 1), float64: multiples of 2⁻⁵³."""
        out = np.empty(whole("count", count, least=0))
        for piece in _pieces(count):
            np.multiply(_words(len(out[piece]), self._next(use=0)) & _MASK, 2.0**-53, out=out[piece])
        return torch.from_numpy(out)

    def seed(self) -> int:
        """63 bits, for generators that are no streams."""
        return int(_words(1, self._next(use=3))[0]) & ((1 << 63) - 1)

    def normal(self, shape: Sequence[int], narrow: bool = False) -> Tensor:
        """Independent standard normals, float64; ``narrow``: what they are added to is then rounded to float32."""
        out = torch.empty(math.prod(shape), dtype=torch.float64, device="cpu")
        for piece, normals in self._normals(len(out), narrow):
            out[piece] = normals
        return out.view(tuple(shape))

    def _normals(self, count: int, narrow: bool) -> Iterator[tuple[slice, Tensor]]:
        """So many standard normals, a block at a time with its place; the next one takes its memory."""
        draw, each, rows = (_one_draw, 5, 4) if narrow else (_two_draws, 8, 8)
        most = (min(count, _BLOCK) + 1) // 2
        # one memory for all blocks: a fresh one would have to be mapped page by page
        words, room = np.empty(each * most, np.int32), torch.empty(rows * most, dtype=torch.float64, device="cpu")
        for piece in _pieces(count):
            size = piece.stop - piece.start
            half = (size + 1) // 2
            own = words[: each * half]
            keystream(*self._next(use=1), own.data.cast("B"))
            yield piece, draw(own, room[: rows * half].view(rows, half))[:size]

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
                noisy = gpu_noise.noisy_all(some, own, key, int.from_bytes(nonce, "little"), divisor, dtype)
            else:
                noisy = self._noisy_here(some, own, divisor, dtype or some[0].dtype)
            for i, value in zip(places, noisy, strict=True):
                out[i] = value
        return out

    def _noisy_here(
        self, values: Sequence[Tensor], scales: Sequence[float], divisor: float, dtype: torch.dtype
    ) -> list[Tensor]:
        """On the CPU, a block at a time."""
        if dtype == torch.float32 and cpu_noise.built():
            return self._noisy_compiled(values, scales, divisor)
        return self._noisy_plain(values, scales, divisor, dtype)

    def _noisy_compiled(self, values: Sequence[Tensor], scales: Sequence[float], divisor: float) -> list[Tensor]:
        """By compiled code, in PyTorch's threads."""
        table = cpu_noise.Table(values, scales, divisor)
        left = deque((piece, self._next(use=1)) for piece in _pieces(table.count))
        written: list[int] = []

        def work() -> None:
            words = np.empty(5 * ((min(table.count, _BLOCK) + 1) // 2), np.int32)
            while True:
                try:
                    piece, start = left.popleft()
                except IndexError:
                    return
                own = words[: 5 * ((piece.stop - piece.start + 1) // 2)]
                keystream(*start, own.data.cast("B"))
                written.append(table.add(own, piece))

        cpu_noise.at_once(work, min(torch.get_num_threads(), len(left)))
        if sum(written) != table.count:  # what is left in that memory may be anything
            raise RuntimeError(f"noise was added to {sum(written)} of {table.count} numbers")
        return [out.to(value.device) for out, value in zip(table.out, values, strict=True)]

    def _noisy_plain(
        self, values: Sequence[Tensor], scales: Sequence[float], divisor: float, dtype: torch.dtype
    ) -> list[Tensor]:
        """By PyTorch's operations, all in a row: a block's normals are added while they lie in the cache."""
        row = torch.cat([value.detach().to("cpu").flatten() for value in values])  # a graph would keep the bare value
        out = torch.empty_like(row, dtype=dtype)
        sizes = [value.numel() for value in values]
        ends = list(itertools.accumulate(sizes))
        for piece, noise in self._normals(len(row), dtype != torch.float64):
            for scale, size, end in zip(scales, sizes, ends, strict=True):
                if end - size < piece.stop and piece.start < end:
                    noise[max(end - size - piece.start, 0) : end - piece.start] *= scale
            noise += row[piece]
            out[piece] = noise if divisor == 1 else noise.div_(divisor)
        return [noisy.view(v.shape).to(v.device) for v, noisy in zip(values, out.split(sizes), strict=True)]


def _pieces(count: int) -> Iterator[slice]:
    """0 to ``count``, a block at a time."""
    return (slice(at, min(at + _BLOCK, count)) for at in range(0, count, _BLOCK))


class SecureStream(Stream):
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

    name = "AES-256-CTR, on CUDA ChaCha20"

    def _next(self, use: int) -> tuple[bytes, bytes]:
        return os.urandom(32), bytes(12)

    def at(self, step: int) -> SecureStream:
        """Itself: no step of a secure stream can be repeated."""
        return self


class _Keyed(Stream):
    """Random numbers of one key: the same ones wherever the key is known."""

    def __init__(self, name: str, key: bytes) -> None:
        self.name, self._key = name, key
        self._blocks = [0, 0, 0, 0]  # by use: uniforms, normals, noise on CUDA, seeds

    def _next(self, use: int) -> tuple[bytes, bytes]:
        self._blocks[use] += 1
        key = _derived(self._key, "on CUDA") if use == 2 else self._key  # two ciphers never have one key
        return key, use.to_bytes(4, "little") + self._blocks[use].to_bytes(8, "little")


class SharedStream(_Keyed):
    """Secret random numbers that the processes of one run have in common, which each draws for itself.

    The key comes from one process's operating system. *Guarantees.* No two steps share numbers, also where a step is
    begun again; those of a step are the same in every process, but for seeds, which are a process's own.
    """

    def __init__(self, key: bytes, process: int) -> None:
        """Process number ``process`` of those that have this key."""
        super().__init__(SecureStream.name, key)
        self._process, self._begun = process, 0

    def _next(self, use: int) -> tuple[bytes, bytes]:
        key, nonce = super()._next(use)
        return (_derived(key, f"process {self._process}") if use == 3 else key), nonce

    def at(self, step: int) -> SharedStream:
        """A stream for the step that is begun now."""
        self._begun += 1
        return SharedStream(_derived(self._key, f"step {self._begun}"), self._process)


def _derived(key: bytes, use: str) -> bytes:
    return hashlib.sha256(key + use.encode()).digest()


class SeededStream(_Keyed):
    """Random numbers that anyone with the seed can repeat: for tests, never for a release that must stay private.

    *Guarantees.* The same seed and step give the same numbers; steps are independent of each other, and so are the
    uniforms and the normals of one step, in whatever order they are asked for. On CUDA the noise is another, since the
    kernel orders its numbers differently: as the tensor lies in memory, whose order it keeps.
    """

    def __init__(self, seed: int, step: int | None = None) -> None:
        """A stream for the seed, and for one step of it."""
        name = f"seeded({whole('seed', seed, least=0)})"
        super().__init__(name, hashlib.sha256(f"clipwise seed {seed} step {step}".encode()).digest())
        self._seed = seed

    def at(self, step: int) -> SeededStream:
        """The stream of that step, from its beginning: a resumed run repeats it."""
        return SeededStream(self._seed, whole("step", step, least=0))


def stream_of(noise: str | int) -> Stream:
    """What ``noise`` asks for: "secure", or a seed, which is for tests."""
    if noise == "secure":
        return SecureStream()
    if isinstance(noise, bool) or not isinstance(noise, Integral):
        raise InputError(f"noise must be 'secure' or a seed (a whole number), got {noise!r}")
    return SeededStream(int(noise))
