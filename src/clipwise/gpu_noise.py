"""Gaussian noise on the GPU: ChaCha20 and Box–Muller in one Triton kernel, so that nothing random crosses the bus.

Receives: CUDA tensors, each with its noise's scale, and a key and nonce that no other call has.
Gives: the tensors with noise added, over a divisor, perhaps in another format.

Results in float64 are made as on the CPU (``randomness``): every normal is the sum of two draws that share no pair of
Box–Muller's, and a ChaCha20 block of 16 words is 4 pairs, 4 outputs. Results in float32 need one draw (it says why),
and a block is 3 pairs, 6 outputs. Of B blocks, block b makes the outputs b, b + B, b + 2B and so on, so that
neighbouring threads touch neighbouring numbers. Outputs are counted as they lie in memory: the noise is independent, so
that it does not matter which number gets which, and a tensor with its channels last is read and written as it is.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl, triton
from clipwise.types import InputError, Refused, positive, whole

_THREADS = 128  # ChaCha20 blocks per program, one per thread; the numbers do not depend on it


def noisy_all(
    values: Sequence[Tensor],
    scales: Sequence[float],
    key: bytes,
    nonce: int,
    divisor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """(Each value + its scale · z)/divisor, all of one device and format, by one launch: a model has many parameters.

    z are independent standard normals, drawn, added and divided in float64, and the result is rounded once, to
    ``dtype`` or the values' own. Guarantees: no two numbers, of one tensor or of several, come from the same words; the
    same key and nonce give the same z, in the order of the numbers in memory, and another key or nonce gives
    independent ones. Neither is compiled into a kernel, and the key's copy on the device is erased. A result has the
    strides of its value, or is contiguous where that has gaps or repeats in memory. Edge cases: empty tensors give
    empty ones; a CUDA graph would replay one key for ever, and is refused.
    """
    if len({(value.dtype, value.device) for value in values}) > 1 or len(values) != len(scales):
        raise InputError(f"expected tensors of one format and device, and a scale for each, got {len(scales)} scales")
    for scale in set(scales):  # few for many tensors, and the device waits for this loop
        positive("scale", scale)
    factor = 1.0 / positive("divisor", divisor)
    if not values:
        return []
    _check_dtype(values[0].dtype)
    sizes = list(map(Tensor.numel, values))
    result = dtype or values[0].dtype
    each = _THREADS * (4 if result == torch.float64 else 6)  # numbers of a program
    # every tensor begins with a program of its own, so that a program has one tensor
    firsts = list(itertools.accumulate([-(-size // each) for size in sizes], initial=0))
    if firsts[-1] * _THREADS > 1 << 32:
        raise InputError("ChaCha20 counts at most 2³² blocks of 4 or 6 numbers: release the tensors in several calls")
    room = torch.empty(sum(sizes), dtype=result, device=values[0].device)  # one piece for all
    out = list(torch.unsafe_split_with_sizes(room, sizes))  # faster than views that autograd follows
    given = [_without_gaps(value) for value in values]
    rows: list[float] = []
    address, width = room.data_ptr(), room.element_size()
    for i, (value, size, scale) in enumerate(zip(given, sizes, scales, strict=True)):
        strides = value.stride()
        if strides != (1,):  # else the piece is as it should be
            out[i] = out[i].as_strided(value.shape, strides)
        if size:
            rows += (address, value.data_ptr(), size, firsts[i], scale, factor)
            address += size * width
    if rows:
        table = struct.pack("<" + "qqqqdd" * (len(rows) // 6), *rows)
        _launch(_add_noise, firsts[-1] * _THREADS, key, nonce, room, given[0], len(rows) // 6, more=table)
    return out


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"noise is added to float32 or float64, got {dtype}: write value.float()")


def _without_gaps(value: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its numbers are not one piece of memory that holds each of them once."""
    return value if value.is_contiguous() or _dense(value.shape, value.stride()) else value.contiguous()


@functools.lru_cache(maxsize=4096)
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether such a tensor fills its memory, with its axes in any order: channels last, or transposed."""
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:  # one number takes no step
            if stride != filled:
                return False
            filled *= size
    return True


def keystream(key: bytes, nonce: int, blocks: int, device: torch.device | str) -> Tensor:
    """The words that ``noisy_all`` reads, for test vectors. int32 [block, 16]."""
    out = torch.empty(blocks, 16, dtype=torch.int32, device=device)
    _launch(_write_words, blocks, key, nonce, out)
    return out


def _launch(kernel: Any, blocks: int, key: bytes, nonce: int, out: Tensor, *arguments: Any, more: bytes = b"") -> None:
    """Run the kernel on the device of ``out``, unless there is nothing to do. ``more`` comes after the state."""
    if len(key) != 32 or whole("nonce", nonce, least=0) >= 1 << 96:
        raise InputError(f"ChaCha20 needs a key of 32 bytes and a nonce below 2⁹⁶, got {len(key)} bytes and {nonce}")
    if out.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Refused("a CUDA graph would add the same noise at every replay: add noise outside the graph")
    if triton is None:
        raise InputError("noise on a CUDA device needs Triton, which is not installed: pip install triton")
    if not blocks:
        return
    # The state of RFC 8439 §2.3 with counter 0. Scales stand in ``more``: numbers passed to a kernel may be rounded to
    # float32 or compiled into it. Pageable memory is staged before a non-blocking copy returns.
    packed = struct.pack("<16s32s4x12s", b"expand 32-byte k", key, nonce.to_bytes(12, "little"))
    inputs = torch.frombuffer(bytearray(packed + more), dtype=torch.uint8).to(out.device, non_blocking=True)
    with torch.cuda.device_of(inputs):
        kernel[(-(-blocks // _THREADS),)](out, *arguments, inputs, blocks, _THREADS, num_warps=4)
    inputs.zero_()  # freed memory is handed on as it is


# else numbers divisible by 16 are compiled once more
@jit(do_not_specialize=["tensors", "blocks"])  # type: ignore[untyped-decorator]
def _add_noise(
    out: tl.tensor,
    value: tl.tensor,
    tensors: tl.tensor,
    inputs: tl.tensor,
    blocks: tl.tensor,
    threads: constexpr,
) -> None:
    """Kernel: out = (value + scale · z)/divisor, for every tensor of the table behind the state.

    A row of it: [out, value, size, first program, scale, 1/divisor].
    ``out`` and ``value`` are there for their formats.
    """
    program = tl.program_id(0).to(tl.int64)
    table = (inputs + 64).to(tl.pointer_type(tl.int64))
    numbers = (inputs + 64).to(tl.pointer_type(tl.float64))
    firsts = (inputs + 88).to(tl.pointer_type(tl.int32))  # fewer than 2³¹ programs: half of the 64 bits will do
    low, high = 0, tensors  # the last tensor that begins at this program or before
    while high - low > 1:
        middle = (low + high) >> 1
        later = tl.load(firsts + 12 * middle.to(tl.int64)) > tl.program_id(0)
        low, high = tl.where(later, low, middle), tl.where(later, middle, high)
    into = tl.load(table + 6 * low).to(out.dtype)
    given = tl.load(table + 6 * low + 1).to(value.dtype)
    size = tl.load(table + 6 * low + 2)
    own = (program - tl.load(table + 6 * low + 3)) * threads + tl.arange(0, threads)
    counter = program * threads + tl.arange(0, threads)
    state = inputs.to(tl.pointer_type(tl.int32))
    scale, factor = tl.load(numbers + 6 * low + 4), tl.load(numbers + 6 * low + 5)
    words = _block(state, counter.to(tl.uint32))
    if out.dtype.element_ty == tl.float64:
        blocks = (size + 3) >> 2
        z = _two_draws(words, 0) + _two_draws(words, 8)
    else:
        blocks = (size + 5) // 6
        z = _one_draw(words, 0) + _one_draw(words, 5) + _one_draw(words, 10)
    for i in tl.static_range(len(z)):
        _add(given, into, own + i * blocks, scale * z[i], factor, (own < blocks) & (own + i * blocks < size))


@jit(do_not_specialize=["blocks"])  # type: ignore[untyped-decorator]
def _write_words(out: tl.tensor, inputs: tl.tensor, blocks: tl.tensor, threads: constexpr) -> None:
    """Kernel: the keystream, block after block."""
    b = tl.program_id(0).to(tl.int64) * threads + tl.arange(0, threads)
    words = _block(inputs.to(tl.pointer_type(tl.int32)), b.to(tl.uint32))
    for i in tl.static_range(16):
        tl.store(out + b * 16 + i, words[i].to(tl.int32, bitcast=True), mask=b < blocks)


@jit
def _add(value: tl.tensor, out: tl.tensor, at: tl.tensor, noise: tl.tensor, factor: tl.tensor, mask: tl.tensor) -> None:
    """Add noise to the numbers at these places and multiply by the factor, in float64."""
    total = (tl.load(value + at, mask=mask).to(tl.float64) + noise) * factor
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@jit
def _two_draws(words: tl.tuple, i: constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two normals from eight words: (z + z′)/√2 with the cosines, and with the sines, of two pairs."""
    first = _root(_minus_log(_pair(words[i], words[i + 1]), 0.0))  # r/√2
    second = _root(_minus_log(_pair(words[i + 2], words[i + 3]), 0.0))
    cosine, sine = _turn(_pair(words[i + 4], words[i + 5]))
    other_cosine, other_sine = _turn(_pair(words[i + 6], words[i + 7]))
    return first * cosine + second * other_cosine, first * sine + second * other_sine


@jit
def _one_draw(words: tl.tuple, i: constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two normals from five words: r cos θ and r sin θ, r of 96 bits."""
    radius = _root(2.0 * _minus_log(_pair(words[i], words[i + 1]), words[i + 2].to(tl.float64)))
    cosine, sine = _turn(_pair(words[i + 3], words[i + 4]))
    return radius * cosine, radius * sine


@jit
def _minus_log(word: tl.tensor, more: tl.tensor) -> tl.tensor:
    """−ln u for u = (word + (more + ½) 2⁻³²) 2⁻⁶⁴, without the library's branches for arguments that do not occur."""
    v = tl.fma(more + 0.5, 2.0**-32, word.to(tl.float64))  # 2⁶⁴ u: never 0
    bits = v.to(tl.int64, bitcast=True)
    # v = 2ᵏ m, √½ ≤ m < √2 (its high word is 0x3FE6A09E or more)
    k = ((bits >> 32).to(tl.int32) - 0x3FE6A09E) >> 20
    m = (bits - (k.to(tl.int64) << 52)).to(tl.float64, bitcast=True)
    # −ln m = 2 artanh s, s = (1 − m)/(1 + m): 1 − m is exact, so that all digits are right next to 1, too
    seed = tl.rsqrt((1.0 + m).to(tl.float32))
    inverse = (seed * seed).to(tl.float64)
    e = 1.0 - (1.0 + m) * inverse  # below 2⁻²⁰: what e³ would add is lost in rounding
    s = (1.0 - m) * inverse
    s += s * (e + e * e)
    # 2 artanh(s)/s within 2⁻⁵⁸; coefficients of 21 bits fit into an instruction
    x = s * s
    p = 0.18183565139770508 + x * (0.15314102172851562 + x * 0.1479548215866089)
    p = 0.28571428744285315 + x * (0.2222219845460327 + x * p)
    p = 2.0 + x * (0.6666666666666724 + x * (0.399999999994167 + x * p))
    return tl.fma(s, p, 0.6931471805599453 * (64 - k).to(tl.float64))


@jit
def _root(x: tl.tensor) -> tl.tensor:
    """√x for x = 0 or 2⁻⁵³ ≤ x < 135, where float32's approximate inverse is in range: 22 bits, tripled by one step."""
    inverse = tl.rsqrt(x.to(tl.float32) + 1e-30).to(tl.float64)  # finite for 0, and else the sum is x
    y = x * inverse
    e = 1.0 - y * inverse
    return y + y * (e * (0.5 + 0.375 * e))


@jit
def _turn(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Cosine and sine of t turns, t the low 53 bits over 2⁵³, without the library's branches and tables."""
    # The highest of the 53 bits is the half turn, which flips both signs; the other 52 are the digits of a number in
    # [1, 2), half turns from 1. From the quarter turn at 1.5, half turns the other way: exact, −½ < h ≤ ½.
    sign = (word << 11) & 0x8000000000000000
    h = 1.5 - (word & 0xFFFFFFFFFFFFF | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    # sin πh = h p and cos πh = (h² − ¼) q, each within 2⁻⁵⁴ of itself, so that both are 0 where they should be
    x = h * h
    p = 0.00046629970893263817 + x * (-2.1903179003857076e-05 + x * 7.694725354667753e-07)
    p = -0.5992645293194676 + x * (0.08214588657523297 + x * (-0.007370430496523422 + x * p))
    p = 3.141592653589793 + x * (-5.16771278004997 + x * (2.5501640398773393 + x * p))
    q = 0.0019036697022300883 + x * (-0.00010351522359997034 + x * 4.131827154196799e-06)
    q = -1.2780132969493538 + x * (0.2289978875193276 + x * (-0.025330969594319193 + x * q))
    q = -4.0 + x * (3.739208802178683 + x * q)
    return _flip(h * p, sign), _flip(tl.fma(h, h, -0.25) * q, sign)


@jit
def _flip(x: tl.tensor, sign: tl.tensor) -> tl.tensor:
    """x or −x, by its highest bit."""
    return (x.to(tl.uint64, bitcast=True) ^ sign).to(tl.float64, bitcast=True)


@jit
def _pair(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Two words of the cipher as one of 64 bits."""
    return high.to(tl.uint64) << 32 | low


@jit
def _block(state: tl.tensor, counter: tl.tensor) -> tuple[tl.tensor, ...]:
    """The block function of RFC 8439 §2.3 for every counter: 16 vectors of words."""
    x0, x1, x2, x3 = _word(state, 0), _word(state, 1), _word(state, 2), _word(state, 3)
    x4, x5, x6, x7 = _word(state, 4), _word(state, 5), _word(state, 6), _word(state, 7)
    x8, x9, x10, x11 = _word(state, 8), _word(state, 9), _word(state, 10), _word(state, 11)
    x12, x13, x14, x15 = counter, _word(state, 13), _word(state, 14), _word(state, 15)
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + _word(state, 0),
        x1 + _word(state, 1),
        x2 + _word(state, 2),
        x3 + _word(state, 3),
        x4 + _word(state, 4),
        x5 + _word(state, 5),
        x6 + _word(state, 6),
        x7 + _word(state, 7),
        x8 + _word(state, 8),
        x9 + _word(state, 9),
        x10 + _word(state, 10),
        x11 + _word(state, 11),
        x12 + counter,
        x13 + _word(state, 13),
        x14 + _word(state, 14),
        x15 + _word(state, 15),
    )


@jit
def _quarter(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tuple[tl.tensor, ...]:
    """The quarter round of RFC 8439 §2.1 on 32-bit words."""
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@jit
def _word(state: tl.tensor, i: constexpr) -> tl.tensor:
    """Word i of the state, one for all threads."""
    return tl.load(state + i).to(tl.uint32, bitcast=True)
