"""The weights between the two graphs of a compiled step.

Receives: norms [row, group], where the first graph writes them, and the rule that makes weights of them.
Gives: Weights, which keeps them where the second graph reads them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipwise.records.capture import graph_of
from clipwise.records.gradients import FromNorms, Weighed, soon
from clipwise.records.kernels import ZeroRows
from clipwise.records.replay import Replay, compiled

CLOSE = 1e-5  # of a weight: what a fused multiplication or another division may change, far below any margin
# norms [row, group] and which rows are real → weights, which rows are finite, and how many of the real ones are not
Counted = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Weights:
    """The weights between the two graphs: for all rows of a chunk, zero for those that only fill it.

    A method weighs norms as it likes, in some thirty small steps. On CUDA they are compiled to a few and recorded when
    the same rule comes a second time; one that changes from step to step, or that cannot be recorded, runs as it is.
    Rows that are not finite are then set to zero where they lie (``clean``), so that the host need not know of them.
    """

    def __init__(self, norms: Tensor, pool: Any, clean: ZeroRows | None, options: dict[str, Any]) -> None:
        self.every = torch.zeros_like(norms)  # [row, group], where the second graph reads them
        self._real = torch.zeros(len(norms), dtype=torch.bool, device=norms.device)
        self._places = torch.arange(len(norms), device=norms.device)
        self._lost = torch.zeros((), dtype=torch.long, device=norms.device)
        self._pool, self._clean, self._options, self._samples = pool, clean, options, 0
        self._rule: FromNorms | None = None  # the last one
        self._times = 0  # in a row
        self._recorded: Replay | None = None  # of it

    def __call__(self, norms: Tensor, samples: int, rule: FromNorms) -> Weighed:
        """The rule's weights of the first ``samples`` rows, and how many of them are not finite."""
        if samples != self._samples:
            torch.lt(self._places, samples, out=self._real)
            self._samples = samples
        if rule != self._rule:
            self._rule, self._times, self._recorded = rule, 0, None
        self._times += 1
        if self._recorded is not None:
            self._recorded(norms)
        else:
            self._by(counted(rule), norms)
            if self._times == 2 and norms.is_cuda:
                self._recorded = self._record(rule, norms)
        lost = functools.partial(int, self._lost.clone())  # a copy, which the next chunk leaves alone
        whole = None if self._clean is not None else soon(norms.isfinite().all())  # rows that only fill it, too
        return Weighed(norms[:samples], self.every[:samples], lost, lambda: whole is None or bool(whole()))

    def forget(self) -> None:
        """Set all records to zero, where that can be done."""
        if self._clean is not None:
            self._clean(torch.zeros_like(self._real))

    def padded(self, weights: Tensor) -> Tensor:
        """Any weights [sample, group] in the place of the last ones."""
        if weights.data_ptr() != self.every.data_ptr():
            self.every.zero_()
            self.every[: len(weights)] = weights
        return self.every

    def _by(self, rule: Counted, norms: Tensor) -> None:
        weights, finite, lost = rule(norms, self._real)
        self.every.copy_(weights)
        self._lost.copy_(lost)
        if self._clean is not None:
            self._clean(finite)

    def _record(self, rule: FromNorms, norms: Tensor) -> Replay | None:
        before, eager = torch.cuda.get_sync_debug_mode(), self.every.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not every wait is found: for this a first try is good enough
            torch.cuda.set_sync_debug_mode("error")
        try:
            self._by(counted(rule), norms)
        except RuntimeError:  # it asks for a value, for which no recording can wait; to try would spoil later ones
            return None
        finally:
            torch.cuda.set_sync_debug_mode(before)
        fast = fused(rule, norms, self._real, self._options)
        recorded = Replay(lambda norms: self._by(fast, norms), (norms,), self._pool)
        self.every.fill_(torch.nan)  # what a replay does not write is seen
        recorded(norms)
        same = torch.allclose(self.every, eager, rtol=CLOSE, atol=0)
        self.every.copy_(eager)  # this step's weights, whatever the recording wrote
        return recorded if same else None


def counted(rule: FromNorms) -> Counted:
    """The rule, which also counts the real rows that are not finite."""

    def run(norms: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, finite = rule(norms, real)
        return weights, finite, (real & ~finite).sum()

    return run


def fused(rule: FromNorms, norms: Tensor, real: Tensor, options: dict[str, Any]) -> Counted:
    """The same compiled, for norms of this shape; as it is where a compiler fails or gives other weights.

    The two are held against each other over all sizes that a norm can have, and what is none.
    """
    plain, shape = counted(rule), norms.shape
    sizes = torch.logspace(-44, 38, max(norms.numel() - 3, 1), dtype=norms.dtype, device=norms.device)
    probe = torch.cat([norms.new_tensor([0.0, torch.inf, torch.nan]), sizes])[: norms.numel()].view(shape)
    try:
        fast: Counted = compiled(graph_of(plain, norms, real), options)
        for given in (probe, probe.flip(0), norms):
            for mine, own in zip(fast(given, real), plain(given, real), strict=True):
                torch.testing.assert_close(mine, own, rtol=CLOSE, atol=0, equal_nan=True)
    except Exception:  # a rule may be any Python, and a compiler may give up in any way
        return plain
    return fast
