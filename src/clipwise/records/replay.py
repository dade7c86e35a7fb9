"""A graph of tensor operations, compiled; on CUDA also recorded as a CUDA graph and replayed.

Receives: a traced graph and an example of its arguments.
Gives: ready: the fastest way to run it; compiled: without recording; Replay: a recording of any function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds import full_precision
from clipwise.records.trees import tensors
from clipwise.types import InputError

INDUCTOR = {
    "comprehensive_padding": False,  # padded rows that are also outputs gave wrong numbers, or none (torch 2.11)
    # without it a norm may be taken of numbers before they are rounded to half precision, and the sum afterwards
    "emulate_precision_casts": True,
    # such casts count as work: with the usual 30, every normalised input would be written in float32 to be read once
    "realize_opcount_threshold": 100,
}
ROUNDS_FIRST = "2.13"  # the first torch known to keep emulate_precision_casts on a processor; 2.11 does not


def ready(graph: Callable[..., Any], example: tuple[Any, ...], options: dict[str, Any], pool: Any = None) -> Any:
    """The graph compiled; on CUDA also recorded, with the example's tensors as its fixed inputs."""
    run = compiled(graph, options)
    run(*example)
    with torch.no_grad():
        return Replay(run, example, pool) if any(t.is_cuda for t in tensors(example)) else run


def compiled(graph: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The graph compiled, by these options of ``torch.compile``."""
    if options == {"backend": "eager"}:  # nothing to compile: the graph as it was traced, for its CUDA graph
        return _quietly(graph)
    if "backend" not in options:
        _refuse_early_norms(graph)
        options = {**options, "options": {**options.get("options", {}), **INDUCTOR}}
    return _quietly(torch.compile(graph, fullgraph=True, dynamic=False, **options))


def _refuse_early_norms(graph: Any) -> None:
    """Refuse a compiler that takes norms of numbers before they are rounded."""
    values = (node.meta.get("val") for node in getattr(getattr(graph, "graph", None), "nodes", ()))
    half = any(isinstance(t, Tensor) and t.dtype in HALF and not t.is_cuda for t in values)
    if half and torch.__version__ < ROUNDS_FIRST:
        raise InputError(
            f"compile=True in half precision on a processor needs torch {ROUNDS_FIRST}, got {torch.__version__}, whose "
            "compiler takes norms of numbers before they are rounded: leave compile out"
        )


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        # the graph holds its own backward pass, and the casts that it was traced with
        with torch.no_grad(), full_precision(next(tensors(arguments))):
            return function(*arguments)

    return run


class Replay:
    """A CUDA graph of a function; inputs are copied into the tensors that it was captured with."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], pool: Any) -> None:
        self.inputs = [(t, t.data_ptr()) for t in tensors(inputs)]
        with torch.cuda.device(self.inputs[0][0].device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.outputs = function(*inputs)
        self.pool = self.graph.pool()

    def __call__(self, *arguments: Any) -> Any:
        """Its results for these arguments: overwritten by the next call."""
        pairs = zip(self.inputs, tensors(arguments), strict=True)
        moved = [(mine, given.detach()) for (mine, place), given in pairs if given.data_ptr() != place]
        if moved:
            # many at once: past iterates have as many as there are parameters
            torch._foreach_copy_([mine for mine, _ in moved], [given for _, given in moved])
        return self.again()

    def again(self) -> Any:
        """Its results for what its inputs hold."""
        self.graph.replay()
        return self.outputs
