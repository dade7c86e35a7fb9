"""What a traced pass is made into before it is compiled: less to compute, and no copies that only eager kernels need.

Receives: the graph of a forward and a backward pass, traced together.
Gives: lean: the same graph with normalisations taken apart, without layout copies, costly repeats, second paddings and
wide tensors that are kept for a sign.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from clipwise.records.capture import graph_of
from clipwise.records.decompositions import taken_apart
from clipwise.records.kernels.gram import HALF

aten = torch.ops.aten
NAMES = (aten.alias.default, aten.detach.default)  # another name of the same tensor
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
SHAPES = (  # the same numbers in the same order
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
)
COSTLY = (
    *(aten.var_mean.correction, aten.var.correction, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default),
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default),
)


def lean(graph: Any, *example: Any) -> Callable[..., Any]:
    """The traced graph with normalisations taken apart, and all that is below.

    A compiler removes what is computed twice (a normalisation's statistics, in the forward pass and again for the
    gradient of its scale) from the two halves of a training step, but not from one graph that holds them both.
    """
    if any(node.target is aten.as_strided.default for node in _operators(graph)):
        return graph  # it names strides, and must be given the memory that it was traced with
    if any(node.target._schema.is_mutable for node in _operators(graph)):
        # a copy may be the guard of what is written in place, and equal calls may not be equal
        graph = graph_of(torch.func.functionalize(graph), *example)
    graph = without_repeats(graph_of(relaid(graph), *example, decompositions=taken_apart()))
    return narrow_signs(padded_once(graph))


def _operators(graph: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def relaid(graph: Any) -> Any:
    """The graph without layout copies that only eager kernels need, so that channels can stay last throughout.

    On CUDA a group normalisation first copies what it reads to channels-first order, forwards and backwards. A compiler
    takes it apart and reads any order, but keeps the copies, and with them every convolution behind would be given the
    order that it is slowest in.
    """
    normalisations = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
    for node in _operators(graph):
        if node.target is aten.clone.default:
            order = node.kwargs.get("memory_format", torch.preserve_format)
            if order is torch.contiguous_format and all(user.target in normalisations for user in node.users):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
            elif order is torch.channels_last:  # no copy where channels are last by now
                node.target = aten.contiguous.default
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # the order of what it reads may be another now
    graph.graph.eliminate_dead_code()  # a quarter of a traced pass, which would be traced and compiled again
    graph.recompile()
    return graph


def without_repeats(graph: Any) -> Any:
    """The graph with every costly operation of the same arguments done once.

    The graph must be functional, as ``lean`` makes it: in place, equal calls may give different values.
    What is cheap is left repeated: to do it again from a narrow tensor costs less than to keep its result, which a
    compiler would then have to write. Random operations are never repeats.
    """
    first: dict[Any, Any] = {}
    number: dict[Any, Any] = {}  # node → the first one with its value
    shaped: dict[Any, Any] = {}  # node → what it is another shape of
    for node in list(graph.graph.nodes):
        operator_ = isinstance(node.target, torch._ops.OpOverload)
        if not operator_ and node.target is not operator.getitem:
            continue
        if _drawn(node):
            continue
        if node.target in NAMES:
            same, worth = node.args[0], True
        elif node.target in SHAPES and "val" in node.meta:
            given = number.get(node.args[0], node.args[0])
            root = shaped[node] = shaped.get(given, given)
            shape = tuple(node.meta["val"].shape)
            back = "val" in root.meta and tuple(root.meta["val"].shape) == shape
            same, worth = root if back else first.setdefault((root, shape), node), False
        else:
            same = first.setdefault((node.target, _frozen(node.args, number), _frozen(node.kwargs, number)), node)
            worth = node.target in COSTLY or node.target is operator.getitem or _narrows(node)
        number[node] = number.get(same, same)
        if same is not node and worth:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def padded_once(graph: Any) -> Any:
    """The graph with products of padded rows as they are, where they would be cut and padded again for the product.

    Output gradients of an odd number of features are kept with zeros behind them (``layers.products``), and passed on
    without; a compiler pads such rows for its product, which is another copy of what may be the largest tensor of all.
    What the zeros meet is set to zero, too.
    """
    for node in _operators(graph):
        if node.target is not aten.mm.default or (found := _cut(node.args[0])) is None:
            continue
        padded, rest = found
        rows, weight = node.args
        with graph.graph.inserting_before(node):
            size = [*rows.meta["val"].shape[:-1], rows.meta["val"].shape[-1] + rest]
            whole = graph.graph.call_function(aten.reshape.default, (padded, size))
            more = graph.graph.call_function(aten.constant_pad_nd.default, (weight, [0, 0, 0, rest], 0.0))
        node.args = (whole, more)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def narrow_signs(graph: Any) -> Any:
    """The graph in which a ReLU's backward pass asks the bfloat16 copy of its output where that was positive.

    The next convolution reads such a copy, which is kept for its record; the output itself, in float32, would be kept
    from the forward to the backward pass for nothing else. Rounding keeps signs, and what is too small for bfloat16 is
    below 2⁻¹³³.
    """
    copies: dict[Any, Any] = {}  # tensor → its copy in bfloat16
    for node in _operators(graph):
        if node.target in CASTS and node.meta["val"].dtype == torch.bfloat16:
            copies.setdefault(_named(node.args[0]), node)
        elif node.target is aten.threshold_backward.default and node.args[2] == 0:
            copy = copies.get(_named(node.args[1]))  # made before: nodes come in their order
            if copy is not None and copy.meta["val"].shape == node.args[1].meta["val"].shape:
                node.args = (node.args[0], copy, 0)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _drawn(node: Any) -> bool:
    """Whether a node draws random numbers: their order is a part of the result."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _named(node: Any) -> Any:
    """The tensor that a node is another name of."""
    while node.target in NAMES:
        node = node.args[0]
    return node


def _cut(node: Any) -> tuple[Any, int] | None:
    """Of rows of which only a padding was cut away: the padded ones, and by how much."""
    features = node.meta["val"].shape[-1]
    while node.target in SHAPES and node.args[0].meta["val"].shape[-1] == features:
        node = node.args[0]
    if node.target is not aten.slice.Tensor or node.args[0].target is not aten.constant_pad_nd.default:
        return None
    padded, *where = node.args
    rest = padded.meta["val"].shape[-1] - features
    cut = where == [padded.meta["val"].dim() - 1, 0, features]
    added = list(padded.args[1]) == [0, rest] and [*padded.args[2:], 0][0] == 0
    return (padded, rest) if cut and added else None


def _narrows(node: Any) -> bool:
    """A copy in half precision is written anyway, for the product or the convolution that reads it."""
    return any(value in HALF for value in (*node.args[1:2], *node.kwargs.values()) if isinstance(value, torch.dtype))


def _frozen(value: Any, number: Mapping[Any, Any]) -> Any:
    """Arguments as a key, nodes by their value; 1, 1.0 and True are different ones."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part, number) for part in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(part, number)) for key, part in value.items())
    return (type(value), number.get(value, value) if isinstance(value, torch.fx.Node) else value)
