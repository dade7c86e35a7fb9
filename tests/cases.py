"""The catalogue of model cases: one small model and batch for each way in which a parameter meets samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from clipwise.records import SampleGradients, oracle, per_sample, trainable
from clipwise.types import Gradient

SAMPLES = 4
Use = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


class Parts(nn.Module):
    """``run(self, *batch)`` as a model made of named parts."""

    def __init__(self, run: Use, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.run(self, *batch)


@dataclass(frozen=True)
class Case:
    """A model whose output has samples first, and the batch that it is called with."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], Batch]
    fallback: str = ""  # the operation that is expected to go through vmap

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def batch(self) -> Batch:
        torch.manual_seed(1)
        return self.data()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """One value per sample in which every output counts, each with a weight of its own."""
    return each(model(*batch))


def each(output: Tensor) -> Tensor:
    flat = output.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return ((flat + flat.square() / 2) * weights).sum(1)


class Around(nn.Module):
    """A layer behind a trained scale, so that the gradient at the layer's input is tested too."""

    def __init__(self, layer: nn.Module, use: Use | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.use = use or (lambda layer, *given: layer(*given))
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        if x.is_floating_point():
            return self.use(self.layer, x + self.scale * x.tanh(), *rest)
        return self.use(self.layer, x, *rest) * self.scale


class Raw(nn.Module):
    """Parameters used directly: ``use(self, x)`` is the forward."""

    def __init__(self, use: Use, **shapes: Sequence[int]) -> None:
        super().__init__()
        self.use = use
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.5 + torch.rand(tuple(shape))))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.head(self.use(self, x, *rest).reshape(len(x), -1, 3))


class Standardised(nn.Module):
    """Weight standardisation, as a parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        rows = weight.flatten(1)
        return ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).view_as(weight)


def normal(*shape: int, samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, *shape, dtype=torch.float64)


def integers(high: int, *shape: int, samples: int = SAMPLES) -> Tensor:
    return torch.randint(0, high, (samples, *shape))


def layer(
    name: str,
    make: Callable[[], nn.Module],
    *shape: int,
    use: Use | None = None,
    data: Callable[[], Batch] | None = None,
    fallback: str = "",
) -> Case:
    return Case(name, lambda: Around(make(), use), data or (lambda: (normal(*shape),)), fallback)


def randomised(module: nn.Module) -> nn.Module:
    """Affine parameters and statistics away from their ones and zeros."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
            tensor.copy_(0.5 + torch.rand(tensor.shape))
    return module


# ── products and convolutions ───────────────────────────────────────────────────────────────────────────────────────


def products() -> Iterator[Case]:
    for dims in range(2, 6):
        shape = (3, 2, 5)[: dims - 2]
        yield layer(f"Linear on {dims} dimensions", partial(nn.Linear, 4, 3), *shape, 4)
    yield layer("Linear without bias", partial(nn.Linear, 4, 3, bias=False), 3, 4)
    yield layer("Linear with few positions and wide features", partial(nn.Linear, 12, 11), 2, 12)
    yield layer("Linear of one feature", partial(nn.Linear, 1, 1), 3, 1)
    yield layer("deep Linear", lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 3, 4)
    written = lambda: nn.Sequential(nn.Linear(4, 6), nn.ELU(inplace=True), nn.Linear(6, 3))
    yield layer("Linear whose output is written into", written, 3, 4)


def residual(m: Any, x: Tensor) -> Tensor:
    """In place wherever it can be, through a view too, and with a result that nobody takes."""
    kept = F.elu(m[0](x), inplace=True)
    out = m[1](kept)
    out += kept
    out[:, 0].mul_(2)
    F.elu_(out)
    return out


def convolutions() -> Iterator[Case]:
    block = lambda: nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
    yield layer("convolutions of a block that writes in place", block, 2, 5, 5, use=residual)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "with stride": {"stride": 2},
        "with padding": {"padding": 1},
        "with stride that leaves a rest": {"stride": 3, "padding": 1},
        "with padding same": {"padding": "same"},
        "with padding same and dilation": {"padding": "same", "dilation": 2},
        "with padding valid": {"padding": "valid"},
        "with dilation": {"dilation": 2, "padding": 2},
        "with groups": {"groups": 2, "padding": 1},
        "with groups, stride and dilation": {"groups": 2, "stride": 2, "dilation": 2, "padding": 2},
        "depthwise": {"groups": 4},
        "without bias": {"bias": False},
        "with reflect padding": {"padding": 1, "padding_mode": "reflect"},
        "with replicate padding": {"padding": 1, "padding_mode": "replicate"},
        "with circular padding": {"padding": 1, "padding_mode": "circular"},
        "with circular padding same": {"padding": "same", "padding_mode": "circular"},
    }
    for dims, kind, size in ((1, nn.Conv1d, (9,)), (2, nn.Conv2d, (6, 7)), (3, nn.Conv3d, (5, 5, 5))):
        for name, option in options.items():
            outputs = 8 if option.get("groups") == 4 else 6
            yield layer(f"Conv{dims}d {name}", partial(kind, 4, outputs, 3, **option), 4, *size)
    uneven = partial(nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2))
    yield layer("Conv2d with uneven options", uneven, 4, 6, 7)
    yield layer("Conv2d with an even kernel and padding same", partial(nn.Conv2d, 4, 6, 4, padding="same"), 4, 6, 7)
    yield layer("Conv2d of one pixel", partial(nn.Conv2d, 4, 6, 1), 4, 3, 3)
    yield layer("Conv2d that sees the whole image", partial(nn.Conv2d, 4, 6, 5), 4, 5, 5)
    yield layer(
        "Conv2d on channels-last input",
        partial(nn.Conv2d, 4, 6, 3, padding=1),
        use=lambda conv, x: conv(x.contiguous(memory_format=torch.channels_last)),
        data=lambda: (normal(4, 6, 7),),
    )
    options = {
        "plain": {},
        "with stride": {"stride": 2},
        "with output padding": {"stride": 2, "padding": 1, "output_padding": 1},
        "with groups": {"groups": 2, "stride": 2},
        "with dilation": {"dilation": 2, "padding": 1},
        "without bias": {"bias": False},
    }
    sizes = ((1, nn.ConvTranspose1d, (5,)), (2, nn.ConvTranspose2d, (3, 4)), (3, nn.ConvTranspose3d, (3, 3, 2)))
    for dims, kind, size in sizes:
        for name, option in options.items():
            yield layer(f"ConvTranspose{dims}d {name}", partial(kind, 4, 6, 3, **option), 4, *size)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tables() -> Iterator[Case]:
    repeated = lambda: (torch.tensor([[1, 2, 1, 1, 0], [0, 0, 0, 0, 0], [3, 4, 5, 6, 3], [6, 0, 6, 1, 2]]),)
    yield layer("Embedding with repeated ids", partial(nn.Embedding, 7, 3), data=repeated)
    yield layer("Embedding with padding_idx", partial(nn.Embedding, 7, 3, padding_idx=0), data=repeated)
    yield layer("Embedding with padding_idx from the end", partial(nn.Embedding, 7, 3, padding_idx=-1), data=repeated)
    yield layer("Embedding of one id", partial(nn.Embedding, 7, 3), data=lambda: (integers(7),))
    yield layer("Embedding of a grid of ids", partial(nn.Embedding, 7, 3), data=lambda: (integers(7, 2, 3),))
    for mode in ("sum", "mean", "max"):
        bag = partial(nn.EmbeddingBag, 7, 3, mode=mode)
        yield layer(f"EmbeddingBag {mode}", bag, data=repeated)
        yield layer(f"EmbeddingBag {mode} with padding_idx", partial(bag, padding_idx=0), data=repeated)
        for last in (False, True):
            use = partial(ragged, last)
            name = f"EmbeddingBag {mode} of unequal bags{' with the last offset' if last else ''}"
            yield layer(name, partial(bag, include_last_offset=last), use=use, data=repeated)
    weighted = lambda: (*repeated(), normal(5))
    yield layer(
        "EmbeddingBag with per_sample_weights",
        partial(nn.EmbeddingBag, 7, 3, mode="sum"),
        use=lambda bag, ids, weights: bag(ids, per_sample_weights=weights),
        data=weighted,
    )
    yield layer(
        "EmbeddingBag of unequal bags with per_sample_weights",
        partial(nn.EmbeddingBag, 7, 3, mode="sum"),
        use=partial(ragged, False),
        data=weighted,
    )


def ragged(last: bool, bag: nn.Module, ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Bags without their ids 6, as one flat list and offsets; no bag of the catalogue is then empty."""
    real = ids != 6
    offsets = real.sum(1).cumsum(0) - real.sum(1)
    if last:
        offsets = torch.cat([offsets, real.sum()[None]])
    return bag(ids[real], offsets, None if weights is None else weights[real])


# ── normalisations ──────────────────────────────────────────────────────────────────────────────────────────────────


def normalisations() -> Iterator[Case]:
    def case(name: str, make: Callable[[], nn.Module], *shape: int) -> Case:
        return layer(name, lambda: randomised(make()).eval(), *shape)

    yield case("LayerNorm", partial(nn.LayerNorm, 5), 5)
    yield case("LayerNorm on a sequence", partial(nn.LayerNorm, 5), 3, 5)
    yield case("LayerNorm over three dimensions", partial(nn.LayerNorm, (2, 3, 5)), 4, 2, 3, 5)
    yield case("LayerNorm without bias", partial(nn.LayerNorm, 5, bias=False), 3, 5)
    yield case("LayerNorm without parameters", partial(nn.LayerNorm, 5, elementwise_affine=False), 3, 5)
    yield case("GroupNorm", partial(nn.GroupNorm, 2, 6), 6, 3, 3)
    yield case("GroupNorm on a vector", partial(nn.GroupNorm, 2, 6), 6)
    yield case("GroupNorm without parameters", partial(nn.GroupNorm, 2, 6, affine=False), 6, 3, 3)
    yield case("RMSNorm", partial(nn.RMSNorm, 5), 3, 5)
    yield case("RMSNorm with its own epsilon", partial(nn.RMSNorm, 5, eps=0.1), 3, 5)
    yield case("RMSNorm over two dimensions", partial(nn.RMSNorm, (3, 5)), 2, 3, 5)
    kinds = zip((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), ((7,), (3, 4), (2, 3, 2)), strict=True)
    for dims, (kind, size) in enumerate(kinds, 1):
        yield case(f"InstanceNorm{dims}d", partial(kind, 4, affine=True), 4, *size)
    fixed = partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True)
    yield case("InstanceNorm2d in eval mode with statistics", fixed, 4, 3, 4)
    kinds = zip((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ((), (3, 4), (2, 3, 2)), strict=True)
    for dims, (kind, size) in enumerate(kinds, 1):
        yield case(f"BatchNorm{dims}d in eval mode", partial(kind, 4), 4, *size)
    yield case("BatchNorm1d on a sequence in eval mode", partial(nn.BatchNorm1d, 4), 4, 5)
    yield case("BatchNorm2d in eval mode without parameters", partial(nn.BatchNorm2d, 4, affine=False), 4, 3, 4)


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sequence_first(use: Use) -> Use:
    """The same with [position, sample, feature] around it."""
    return lambda layer, *xs: use(layer, *(x.transpose(0, 1) for x in xs)).transpose(0, 1)


def itself(mask: Tensor | None = None, **options: Any) -> Use:
    def use(attention: nn.Module, x: Tensor) -> Tensor:
        own = mask.to(x.dtype) if mask is not None and mask.is_floating_point() else mask
        return attention(x, x, x, attn_mask=own, **options)[0]

    return use


def across(attention: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value)[0]


def with_weights(attention: nn.Module, x: Tensor) -> Tensor:
    output, weights = attention(x, x, x)
    return torch.cat([output.flatten(1), weights.flatten(1)], 1)


def padded(attention: nn.Module, x: Tensor, length: Tensor, **options: Any) -> Tensor:
    padding = torch.arange(x.shape[1]) >= length[:, None]
    return attention(x, x, x, key_padding_mask=padding, **options)[0]


def padded_by_numbers(attention: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
    return attention(x, x, x, key_padding_mask=bias)[0]


def masked_per_sample(attention: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
    return attention(x, x, x, attn_mask=bias.flatten(0, 1))[0]


def functional(attention: nn.MultiheadAttention, x: Tensor, length: Tensor) -> Tensor:
    """The function itself, with a mask that the module has not prepared."""
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, x, x, 6, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0,
        attention.out_proj.weight, attention.out_proj.bias,
        key_padding_mask=torch.arange(len(x)) >= length[:, None],
    )[0].transpose(0, 1)  # fmt: skip


def attentions() -> Iterator[Case]:
    steps = 5
    plain = partial(nn.MultiheadAttention, 6, 2)
    make = partial(plain, batch_first=True)
    causal = torch.ones(steps, steps, dtype=torch.bool).triu(1)
    numbers = torch.linspace(-1, 1, steps * steps, dtype=torch.float64).view(steps, steps)
    x = (steps, 6)
    yield layer("attention, sequence first", plain, *x, use=sequence_first(itself()))
    yield layer("attention, samples first", make, *x, use=itself())
    yield layer("attention without weights", make, *x, use=itself(need_weights=False))
    yield layer("attention with the weights of each head", make, *x, use=itself(average_attn_weights=False))
    yield layer("attention whose weights count", make, *x, use=with_weights)
    yield layer("attention without bias", partial(make, bias=False), *x, use=itself())
    yield layer("attention with bias_kv", partial(make, add_bias_kv=True), *x, use=itself())
    yield layer("attention with zero attention", partial(make, add_zero_attn=True), *x, use=itself())
    both = partial(make, add_bias_kv=True, add_zero_attn=True)
    yield layer("attention with bias_kv, zero attention and a mask", both, *x, use=itself(mask=causal))
    for weights in (True, False):
        end = "" if weights else ", without weights"
        yield layer(f"attention with a boolean mask{end}", make, *x, use=itself(mask=causal, need_weights=weights))
        yield layer(f"attention with a number mask{end}", make, *x, use=itself(mask=numbers, need_weights=weights))
        use = itself(mask=causal, is_causal=True, need_weights=weights)
        yield layer(f"causal attention{end}", make, *x, use=use)
    lengths = lambda: (normal(*x), torch.tensor([5, 2, 3, 1]))
    square = lambda: (normal(SAMPLES, 6), torch.tensor([4, 2, 3, 1]))
    yield layer("attention with padding", make, use=padded, data=lengths)
    yield layer("attention with padding, without weights", make, use=partial(padded, need_weights=False), data=lengths)
    yield layer("attention with as many positions as samples and padding", make, use=padded, data=square)
    yield layer("attention with padding and a mask", make, use=partial(padded, attn_mask=causal), data=lengths)
    few = causal[:SAMPLES, :SAMPLES]
    use = partial(padded, attn_mask=few)
    yield layer("attention with as many positions as samples, padding and a mask", make, use=use, data=square)
    yield layer("attention with bias_kv and padding", both, use=padded, data=lengths)
    biased = lambda: (normal(*x), normal(steps))
    yield layer("attention with number padding", make, use=padded_by_numbers, data=biased)
    own = lambda: (normal(*x), normal(2, steps, steps))
    yield layer("attention with a mask for each sample and head", make, use=masked_per_sample, data=own)
    yield layer("attention as a function with boolean padding", plain, use=functional, data=lengths)
    yield layer("attention as a function with as many positions as samples", plain, use=functional, data=square)
    others = lambda: (normal(*x), normal(3, 6), normal(3, 6))
    yield layer("cross attention", make, use=across, data=others)
    yield layer("cross attention, sequence first", plain, use=sequence_first(across), data=others)
    yield layer("cross attention with one memory", make, data=lambda: (normal(*x), normal(3, 6)),
                use=lambda attention, query, memory: attention(query, memory, memory)[0])  # fmt: skip
    wide = partial(make, kdim=4, vdim=3)
    sizes = lambda: (normal(*x), normal(3, 4), normal(3, 3))
    yield layer("cross attention with kdim and vdim", wide, use=across, data=sizes)
    yield layer("cross attention with kdim, vdim and bias_kv", partial(wide, add_bias_kv=True), use=across, data=sizes)
    encoder = partial(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0)
    yield layer("TransformerEncoderLayer", partial(encoder, batch_first=True), *x)
    yield layer("TransformerEncoderLayer, sequence first", encoder, *x, use=sequence_first(lambda m, x: m(x)))
    first = partial(encoder, batch_first=True, norm_first=True)
    yield layer("TransformerEncoder", lambda: nn.TransformerEncoder(first(), 2, enable_nested_tensor=False), *x)
    decoder = partial(nn.TransformerDecoderLayer, 6, 2, 8, dropout=0.0, batch_first=True)
    yield layer("TransformerDecoderLayer", decoder, data=lambda: (normal(*x), normal(3, 6)))


# ── recurrences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def everything(layer: nn.Module, x: Tensor, *state: Tensor) -> Tensor:
    """All steps' outputs and the last states, so that each receives a gradient."""
    given = [s.transpose(0, 1) for s in state]
    output, last = layer(x, (tuple(given) if len(given) == 2 else given[0]) if given else None)
    output = output if layer.batch_first else output.transpose(0, 1)
    last = last if isinstance(last, tuple) else (last,)
    return torch.cat([output.flatten(1), *(s.transpose(0, 1).flatten(1) for s in last)], 1)


def stepped(layer: nn.Module, x: Tensor) -> Tensor:
    return everything(layer, x.transpose(0, 1))


class LearntStart(nn.Module):
    """A recurrent layer whose first state is trained."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.start = inner, nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.start.expand(1, len(x), 3))[0]


def recurrences() -> Iterator[Case]:
    x = (5, 4)
    kinds: dict[str, Callable[..., nn.Module]] = {
        "LSTM": nn.LSTM,
        "GRU": nn.GRU,
        "RNN": nn.RNN,
        "RNN with relu": partial(nn.RNN, nonlinearity="relu"),
    }
    for name, kind in kinds.items():
        make = partial(kind, 4, 3, batch_first=True)
        yield layer(f"{name}", make, *x, use=everything)
        yield layer(f"{name}, sequence first", partial(kind, 4, 3), *x, use=stepped)
        yield layer(f"{name} of three layers", partial(make, num_layers=3), *x, use=everything)
        yield layer(f"{name} in both directions", partial(make, bidirectional=True), *x, use=everything)
        deep = partial(make, bidirectional=True, num_layers=2)
        yield layer(f"{name} of two layers in both directions", deep, *x, use=everything)
        yield layer(f"{name} without bias", partial(make, bias=False), *x, use=everything)
        yield layer(f"{name} of one step", make, 1, 4, use=everything)
        yield layer(f"{name}'s last output", make, *x, use=lambda m, x: m(x)[0][:, -1])
        states = 2 if name == "LSTM" else 1
        start = lambda states=states: (normal(*x), *(normal(4, 3) for _ in range(states)))
        yield layer(f"{name} with a first state", deep, use=everything, data=start)
        if states == 1:
            yield layer(f"{name} with a first state that is trained", lambda make=make: LearntStart(make()), *x)
    lstm = partial(nn.LSTM, 4, 6, batch_first=True, proj_size=3)
    yield layer("LSTM with a projection", lstm, *x, use=everything)
    deep = partial(lstm, num_layers=2, bidirectional=True)
    yield layer("LSTM with a projection, two layers in both directions", deep, *x, use=everything)
    yield layer("LSTM without bias with a projection", partial(lstm, bias=False), *x, use=everything)
    yield layer("LSTM of which only the last cell counts", partial(nn.LSTM, 4, 3, batch_first=True), *x,
                use=lambda m, x: m(x)[1][1].transpose(0, 1))  # fmt: skip
    for name, kind in {"LSTMCell": nn.LSTMCell, "GRUCell": nn.GRUCell, "RNNCell": nn.RNNCell}.items():
        use = lambda m, x: m(x)[0] if isinstance(m, nn.LSTMCell) else m(x)
        yield layer(name, partial(kind, 4, 3), 4, use=use)


# ── parameters used directly ────────────────────────────────────────────────────────────────────────────────────────


def in_place(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x += m.p
    x *= m.q
    return x


def raw() -> Iterator[Case]:
    def case(name: str, use: Use, *shape: int, fallback: str = "", data: Any = None, **parameters: Any) -> Case:
        return Case(name, lambda: Raw(use, **parameters), data or (lambda: (normal(*(shape or (5, 3))),)), fallback)

    token = {"p": (1, 1, 3)}
    yield case("class token by expand", lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), x], 1), **token)
    yield case("class token by repeat", lambda m, x: torch.cat([m.p.repeat(len(x), 1, 1), x], 1), **token)
    yield case("class token by tile", lambda m, x: torch.cat([m.p.tile((len(x), 1, 1)), x], 1), **token)
    yield case("class token by broadcast_to", lambda m, x: torch.cat([m.p.broadcast_to(len(x), 1, 3), x], 1), **token)
    yield case(
        "class token, position first",
        lambda m, x: torch.cat([m.p.expand(-1, len(x), -1), x.transpose(0, 1)]).transpose(0, 1),
        **token,
    )
    yield case("several tokens", lambda m, x: torch.cat([m.p[None].expand(len(x), -1, -1), x], 1), p=(2, 3))
    yield case("tokens repeated twice a sample", lambda m, x: m.p.repeat(2 * len(x), 1), p=(1, 3))
    yield case("tokens of a function of a parameter",
               lambda m, x: torch.cat([m.p.tanh().expand(len(x), -1, -1), x], 1), **token)  # fmt: skip
    yield case("position table", lambda m, x: x + m.p, p=(5, 3))
    yield case("position table with a sample dimension", lambda m, x: x + m.p, p=(1, 5, 3))
    yield case("position table, sliced", lambda m, x: x + m.p[:, : x.shape[1]], p=(1, 7, 3))
    yield case("position table by expand_as", lambda m, x: x + m.p.expand_as(x), p=(5, 3))
    look_up = lambda m, x: x + F.embedding(torch.arange(x.shape[1]), m.p)
    yield case("position table, looked up", look_up, p=(7, 3))
    look_up = lambda m, x: x + F.embedding(torch.arange(x.shape[1])[None], m.p, padding_idx=0)
    yield case("position table, looked up with padding", look_up, p=(7, 3))
    look_up = lambda m, x: x + F.embedding(torch.arange(x.shape[1]).expand(len(x), -1), m.p)
    yield case("position table, looked up for each sample", look_up, p=(7, 3))
    yield case("scalar", lambda m, x: x * m.p, p=())
    yield case("scalar first", lambda m, x: m.p / x.exp(), p=())
    yield case("layer scale", lambda m, x: x + m.p * x.tanh(), p=(3,))
    yield case("layer scale on channels", lambda m, x: x * m.p[:, None, None], 4, 2, 3, p=(4,))
    yield case("gate", lambda m, x: x * m.p.sigmoid(), p=(3,))
    yield case("arithmetic in place", in_place, p=(3,), q=(5, 1))
    operations: dict[str, Use] = {
        "p + x": lambda m, x: m.p + x,
        "x - p": lambda m, x: x - m.p,
        "p - x": lambda m, x: m.p - x,
        "x / p": lambda m, x: x / m.p,
        "p / x": lambda m, x: m.p / x.exp(),
        "x ** p": lambda m, x: x.exp() ** m.p,
        "p ** x": lambda m, x: m.p**x,
        "rsub": lambda m, x: torch.rsub(m.p, x),
        "maximum": lambda m, x: torch.maximum(x, m.p - 1),
        "lerp": lambda m, x: torch.lerp(x, m.p, m.p),
        "where": lambda m, x: torch.where(x > 0, x, m.p),
        "where with the parameter first": lambda m, x: torch.where(x > 0, m.p, x),
        "add with alpha": lambda m, x: torch.add(x, m.p, alpha=2),
    }
    for name, use in operations.items():
        yield case(f"arithmetic {name}", use, p=(5, 3))
    yield case("arithmetic with two parameters", lambda m, x: torch.lerp(m.p, m.q, x), p=(5, 3), q=(1,))
    yield case("arithmetic on [time, sample, feature]",
               lambda m, x: (x.transpose(0, 1) + m.p).transpose(0, 1), p=(5, 1, 3))  # fmt: skip
    yield case("arithmetic on [sample · time, feature]", lambda m, x: x.flatten(0, 1) * m.p, p=(3,))
    yield case("arithmetic that gives the parameter more dimensions", lambda m, x: x[:, None] + m.p, p=(2, 1, 3))
    for name, use in {
        "x @ W": lambda m, x: x @ m.w,
        "matmul": lambda m, x: torch.matmul(x, m.w),
        "x.matmul(W)": lambda m, x: x.matmul(m.w),
        "mm": lambda m, x: torch.mm(x.flatten(0, 1), m.w),
        "mm by name": lambda m, x: torch.mm(x.flatten(0, 1), mat2=m.w),
        "x @ W on a vector": lambda m, x: x[:, 0] @ m.w,
    }.items():
        yield case(f"product {name}", use, w=(3, 6))
    for name, use in {
        "x @ W.T": lambda m, x: x @ m.w.T,
        "x @ W.t()": lambda m, x: x @ m.w.t(),
        "x @ W.mT": lambda m, x: x @ m.w.mT,
        "x @ W.transpose": lambda m, x: x @ m.w.transpose(0, 1),
        "linear": lambda m, x: F.linear(x, m.w),
        "linear with a sliced weight": lambda m, x: F.linear(x, m.w[:3]),
        "linear with a function of the weight": lambda m, x: F.linear(x, m.w.tanh() * 2),
    }.items():
        yield case(f"product {name}", use, w=(6, 3))
    yield case("product with a square W.T", lambda m, x: x @ m.w.T, w=(3, 3))
    yield case("product linear with W.T", lambda m, x: F.linear(x, m.w.T), w=(3, 6))
    yield case("product on few positions, x @ W", lambda m, x: x @ m.w, 1, 8, w=(8, 9))
    yield case("product on few positions, x @ W.T", lambda m, x: x @ m.w.T, 1, 8, w=(9, 8))
    yield case("product on many positions, x @ W", lambda m, x: x @ m.w, 20, 2, w=(2, 3))
    yield case("low-rank product", lambda m, x: x @ m.u @ m.v, u=(3, 2), v=(2, 3))
    yield case("low-rank update of a weight", lambda m, x: F.linear(x, m.w + m.u @ m.v), w=(3, 3), u=(3, 2), v=(2, 3))
    conv1d = lambda m, x: torch.addmm(m.b, x.reshape(-1, 3), m.w).view(len(x), -1, 6)
    biased = lambda m, x: F.scaled_dot_product_attention(*[x.unsqueeze(1).expand(-1, 2, -1, -1)] * 3, attn_mask=m.p)
    yield case("attention with a trained bias of each head", biased, p=(1, 2, 5, 5))
    yield case("attention with a trained bias for all heads", biased, p=(5, 5))
    yield case("GPT-2's Conv1D", conv1d, w=(3, 6), b=(6,))
    yield case("addmm by name", lambda m, x: torch.addmm(m.b, mat1=x.flatten(0, 1), mat2=m.w), w=(3, 6), b=(6,))
    yield case("batch_norm with fixed statistics",
               lambda m, x: torch.batch_norm(x.mT, m.w, m.b, x.new_ones(3), x.new_ones(3),
                                             False, 0.1, 1e-5, False), w=(3,), b=(3,))  # fmt: skip
    masked = lambda m, x: F.conv1d(x.transpose(1, 2), m.w * torch.tensor([1.0, 1.0, 0.0]), padding=1)
    yield case("convolution with a masked weight", masked, w=(3, 3, 3))


def fallbacks() -> Iterator[Case]:
    def case(name: str, operation: str, use: Use, data: Any = None, **parameters: Any) -> Case:
        return Case(name, lambda: Raw(use, **parameters), data or (lambda: (normal(5, 3),)), operation)

    yield layer("Bilinear", partial(nn.Bilinear, 4, 3, 2), fallback="bilinear", data=lambda: (normal(4), normal(3)))
    yield layer("PReLU", partial(nn.PReLU, 4), 4, 3, fallback="prelu")
    yield case("einsum", "einsum", lambda m, x: torch.einsum("btd,de->bte", x, m.w), w=(3, 6))
    yield case("einsum, time first", "einsum",
               lambda m, x: torch.einsum("tbd,de->bte", x.transpose(0, 1), m.w), w=(3, 6))  # fmt: skip
    yield case("W @ x", "matmul", lambda m, x: m.w @ x, w=(6, 5))
    yield case("x @ vector", "matmul", lambda m, x: (x @ m.w)[:, :3], w=(3,))
    yield case("a parameter at the sample's ids", "__getitem__", lambda m, ids: m.w[ids],
               data=lambda: (integers(7, 5),), w=(7, 3))  # fmt: skip
    yield case("addmm with factors", "addmm",
               lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w, beta=0.5, alpha=2), w=(3, 6), b=(6,))  # fmt: skip
    yield case("linear with one number for all features", "linear",
               lambda m, x: F.linear(x, m.w, m.b), w=(6, 3), b=(1,))  # fmt: skip
    yield case("addmm with one number for all features", "addmm",
               lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w), w=(3, 6), b=(1,))  # fmt: skip


# ── parametrisations ────────────────────────────────────────────────────────────────────────────────────────────────


def parametrised() -> Iterator[Case]:
    def standardised(module: nn.Module) -> nn.Module:
        return parametrize.register_parametrization(module, "weight", Standardised())

    conv = partial(nn.Conv2d, 3, 4, 3, padding=1)
    linear = partial(nn.Linear, 4, 3)
    yield layer("weight standardisation of a Conv2d", lambda: standardised(conv()), 3, 4, 4)
    yield layer("weight standardisation of a Linear", lambda: standardised(linear()), 5, 4)
    yield layer("weight standardisation of an Embedding", lambda: standardised(nn.Embedding(7, 3)),
                data=lambda: (integers(7, 5),))  # fmt: skip
    yield layer("spectral norm of a Linear", lambda: parametrizations.spectral_norm(linear()).eval(), 5, 4)
    yield layer("spectral norm of a Conv2d", lambda: parametrizations.spectral_norm(conv()).eval(), 3, 4, 4)
    yield layer("weight norm of a Linear", lambda: parametrizations.weight_norm(linear()), 5, 4)
    yield layer("weight norm of a Conv2d", lambda: parametrizations.weight_norm(conv()), 3, 4, 4)
    for kind in ("matrix_exp", "cayley", "householder"):
        make = lambda kind=kind: parametrizations.orthogonal(linear(), orthogonal_map=kind)
        yield layer(f"orthogonal Linear by {kind}", make, 5, 4)


# ── partly frozen layers ────────────────────────────────────────────────────────────────────────────────────────────


def partly_frozen() -> Iterator[Case]:
    layers: dict[str, tuple[Callable[[], nn.Module], Use | None, tuple[int, ...]]] = {
        "Linear": (partial(nn.Linear, 4, 3), None, (5, 4)),
        "Conv2d": (partial(nn.Conv2d, 4, 3, 3), None, (4, 5, 5)),
        "ConvTranspose2d": (partial(nn.ConvTranspose2d, 4, 3, 3), None, (4, 2, 2)),
        "LayerNorm": (partial(nn.LayerNorm, 4), None, (5, 4)),
        "GroupNorm": (partial(nn.GroupNorm, 2, 4), None, (4, 3, 3)),
        "attention": (partial(nn.MultiheadAttention, 6, 2, batch_first=True), itself(), (5, 6)),
        "LSTM": (partial(nn.LSTM, 4, 3, batch_first=True), everything, (5, 4)),
        "GRU": (partial(nn.GRU, 4, 3, batch_first=True), everything, (5, 4)),
    }
    for name, (make, use, shape) in layers.items():
        for kind in ("weight", "bias"):
            build = lambda make=make, kind=kind: frozen(make(), kind)
            yield layer(f"{name} with its {kind} frozen", build, *shape, use=use)
    kept = partial(nn.LSTM, 4, 3, batch_first=True)
    yield layer("LSTM with its recurrence frozen", lambda: frozen(kept(), "hh"), 5, 4, use=everything)
    yield layer("LSTM with its input weights frozen", lambda: frozen(kept(), "ih"), 5, 4, use=everything)


def frozen(module: nn.Module, part: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(part not in name)
    return module


CASES = {
    case.name: case
    for family in (
        products, convolutions, tables, normalisations, attentions, recurrences, raw, fallbacks, parametrised,
        partly_frozen,
    )
    for case in family()
}  # fmt: skip


# ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def fast(name: str) -> SampleGradients:
    case = CASES[name]
    return per_sample(case.model(), loss, case.batch())


@cache
def slow(name: str) -> SampleGradients:
    case = CASES[name]
    return oracle.per_sample(case.model(), loss, case.batch())


def one_by_one(model: nn.Module, loss: Callable[..., Tensor], rows: Sequence[Any]) -> Gradient:
    """The plainest reference: torch.autograd.grad of one sample's loss at a time."""
    parameters = trainable(model)
    found = [torch.autograd.grad(loss(model, row)[0], list(parameters.values()), allow_unused=True) for row in rows]
    return {
        name: torch.stack([torch.zeros_like(p) if g[k] is None else g[k] for g in found])
        for k, (name, p) in enumerate(parameters.items())
    }


def flat(gradient: Gradient) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def off(found: Gradient, expected: Gradient) -> float:
    """The largest error, relative to the whole gradient: a part that is zero in theory has no size of its own."""
    assert found.keys() == expected.keys()
    assert all(found[name].shape == expected[name].shape for name in found)
    size = flat(expected).abs().max()
    return float((flat(found) - flat(expected)).abs().max() / size) if size else float(flat(found).abs().max())


def groups(names: Sequence[str]) -> list[list[str]]:
    """Two groups, or one if there is one parameter."""
    return [list(part) for part in (names[::2], names[1::2]) if part]


def direction(like: Gradient) -> Gradient:
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in like.items()}


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
