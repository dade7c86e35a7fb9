"""What a pass draws at random: all generators seeded, looked at and put back, and dropout held still.

Receives: a seed, or a model.
Gives: seeded, generators and drawn_on (states, to compare), watched and reseeds (whether a call draws, or seeds), kept
(a context that puts them back), still (a context in which dropout lets everything through, so that a batch and its
samples one by one can be compared in training mode), and RowDraws (each row draws the same in any company).
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_DROPOUTS = frozenset(
    (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout),
    )
)
_IN_PLACE = 3  # the option's place among the arguments of F.dropout and its kin
_TURN = threading.RLock()  # all threads have the same generators
_ATTENTION_DROPOUT = 4  # its place among the arguments of scaled_dot_product_attention


def seeded(seed: int) -> None:
    """Python's, NumPy's and torch's generators at this seed."""
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])  # it takes words of 32 bits
    torch.manual_seed(seed)


def generators() -> tuple[Any, ...]:
    """The state of each of these generators: equal before and after a call, it drew nothing."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    return random.getstate(), _of_numpy(), *states


def watched(call: Callable[[], T]) -> tuple[T, bool]:
    """What a call gives, and whether it drew at random."""
    before = generators()
    return call(), generators() != before


def drawn_on(device: torch.device) -> tuple[Any, ...]:
    """The states of these generators, of torch's the one for this device: read in 20 µs, since every step asks."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return random.getstate(), _of_numpy(), own.numpy().tobytes()


def _of_numpy() -> Any:
    """The state of NumPy's generator; of the usual one as it lies in memory, for ``get_state`` takes 60 µs."""
    own = np.random.mtrand.get_bit_generator()
    if type(own) is not np.random.MT19937:
        return str(own.state)
    return ctypes.string_at(own.ctypes.state_address, 4 * 625)  # 624 words and a place among them


def reseeds(call: Callable[[], object]) -> bool:
    """Whether a call gives a generator a seed of its own: it is then left in one state, whatever its state before."""
    after = []
    for seed in (0, 1):
        seeded(seed)
        call()
        after.append(generators())
    return any(one == other for one, other in zip(*after, strict=False))  # CUDA's may have come in between


@contextmanager
def kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards the generators are in the state that they were in; other threads wait for their turn with them.

    Else a run in another thread would put back, or seed, what this one has seeded in secret.
    """
    with _TURN:
        own, of_numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=list(devices)):
                yield
        finally:
            random.setstate(own)
            np.random.set_state(of_numpy)


class _Still(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            in_place = kwargs.get("inplace", len(args) > _IN_PLACE and args[_IN_PLACE]) or func.__name__.endswith("_")
            return x.mul_(1) if in_place else x  # still written into, which a capture must know of
        if func is F.scaled_dot_product_attention:
            place = _ATTENTION_DROPOUT
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Torch's dropout, as a module, a function or a layer's option, lets everything through; modes stay as they are."""
    options = [(m, m.dropout) for m in model.modules() if isinstance(m, (nn.RNNBase, nn.MultiheadAttention))]
    for module, _ in options:
        module.dropout = 0.0
    try:
        with _Still():
            yield
    finally:
        for module, dropout in options:
            module.dropout = dropout


class RowDraws:
    """What torch draws for a batch is drawn for each of its rows alone, so that a piece of it draws the same.

    And what is drawn for one row leaves the others' as they are, however much its values say (torch.poisson).

    The batch comes first, then pieces from the same state of the generator. What has one size for any piece, such as a
    noise that all rows share, is the same for all. Edge cases: NumPy's and Python's draws are not told apart.
    """

    def __init__(self, rows: int, needed: bool) -> None:
        """``rows``: those of the batch; ``needed``: whether anything is drawn."""
        self.rows, self.needed = rows, needed
        self.lengths = dict[int, int]()  # of what the batch drew, by its seed

    def of(self, index: Sequence[int]) -> AbstractContextManager[object]:
        """A context for passes over these rows of the batch."""
        return _ByRow(self, index) if self.needed else nullcontext()


class _ByRow(TorchDispatchMode):
    def __init__(self, draws: RowDraws, index: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self.index = draws, index

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, returns = kwargs or {}, func._schema.returns
        drawn = torch.Tag.nondeterministic_seeded in func.tags and len(returns) == 1
        length = next(filter(None, map(_length, args)), 0) if drawn else 0
        if not length:
            return func(*args, **kwargs)
        seed = int(torch.randint(2**62, (), device="cpu"))
        each, groups = self._groups(seed, length)

        def cut(value: Any, place: int) -> Any:
            if _length(value) != length:
                return value
            return value[place * each :][:each] if isinstance(value, Tensor) else [each, *value[1:]]

        parts = []
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            for place, group in enumerate(groups):
                # torch.manual_seed would keep each for a CUDA that is not begun yet, with where it was called
                torch.default_generator.manual_seed(seed + group)
                if torch.cuda.is_initialized():
                    torch.cuda.manual_seed_all(seed + group)
                parts.append(func(*(cut(value, place) for value in args), **kwargs))
        if any(_length(part) != each for part in parts):
            return func(*args, **kwargs)  # its rows are not the samples': torch.multinomial(weights, n), which draws n
        return torch.cat(parts) if returns[0].alias_info is None else args[0]

    def _groups(self, seed: int, length: int) -> tuple[int, Sequence[int]]:
        """How many entries are drawn at a time, and for which rows."""
        lengths, rows = self.draws.lengths, self.draws.rows
        if len(self.index) == rows:  # the last time counts: a capture tries other sizes first
            lengths[seed] = length
        each, left = divmod(lengths.get(seed, length), rows)
        if not left and length == each * len(self.index):
            return each, self.index
        each = each if not left and length % each == 0 else length
        return each, range(length // each)


def _length(value: Any) -> int:
    """Of a tensor, or of a size, in its first dimension."""
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 0
    return value[0] if isinstance(value, (list, tuple)) and value else 0
