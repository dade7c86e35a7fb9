"""Before the first step: everything is checked, and what was left open is filled in.

Receives: a model, a loss that gives one value per sample, data, a method and a privacy budget.
Gives: ``make_private``, which gives Private; whatever is wrong is said before anything is trained.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise import methods, postprocess
from clipwise.accounting import Ledger, calibrate
from clipwise.accounting import spent as spent_on
from clipwise.accounting.calibration import least_noise
from clipwise.accounting.dice import Plan as DicePlan
from clipwise.accounting.dice import planned
from clipwise.accounting.events import ACCOUNTANTS
from clipwise.data import RowDataset, as_dataset
from clipwise.data.copies import refuse_private, refuse_shared, warn_of_copies
from clipwise.engine import Views
from clipwise.losses import cross_entropy
from clipwise.methods import Method
from clipwise.passes import stacked
from clipwise.plain import rounded_up
from clipwise.postprocess import Post, identity
from clipwise.private import Private
from clipwise.randomness import SecureStream, SeededStream, Stream
from clipwise.records import Loss, trainable
from clipwise.records.chance import kept, seeded
from clipwise.records.checks import losses_of, refuse_modules
from clipwise.records.kernels.gram import HALF
from clipwise.records.states import restored
from clipwise.records.tape import mapped, tensors
from clipwise.step import check_weights
from clipwise.trained import trained_elsewhere
from clipwise.types import (
    Batch,
    Event,
    InputError,
    Refused,
    fraction,
    one_of,
    positive,
    spelled,
    whole,
)

CHUNK = 256  # rows that go through the model at a time, unless the user says otherwise


@spelled
def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    *,
    loss: Loss = cross_entropy,
    method: Method | str | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int = 256,
    chunk: int | Literal["auto"] | None = None,
    noise: str | int = "secure",
    accountant: str = "pld",
    self_test: bool = True,
    compile: bool = False,
    post: Post | str | None = None,
    views: Views | None = None,
    public: Tensor | None = None,
    collate: Callable[[list[Any]], Batch] | None = None,
    spent: Ledger | None = None,
    ledger: Ledger | None = None,
) -> Private:
    """Private training for a loop of your own.

    loss: ``loss(model, batch)`` with one value per sample; ``clipwise.cross_entropy`` for (inputs, labels).
    method: what is done with each gradient, such as ``clipwise.psac()`` or "psac(0.1)"; ``flat()`` unless given.
    epsilon, delta: how private; the noise is calibrated to them. noise_multiplier: or the noise itself.
    epochs or steps: how long.
    batch: the expected batch; each sample joins a step with probability batch/samples.
    chunk: rows that go through the model at a time, as many as fit the memory of a GPU, 256 on a processor.
    noise: "secure" draws from the operating system's entropy; a seed is for tests, and the statement names it.
    accountant: "pld", which is tight, or "rdp".
    self_test: compare with the slow way before the first step; without it, the statement says so.
    compile: graphs of one fixed chunk, to which batches are padded: minutes at the start, then faster steps.
    post: filters what was released before the optimizer sees it, such as "heavy_ball(0.9)".
    views: for self_augmentation(augment="own"): called for one row at a time, with that row's own generator, so that it
        cannot mix samples. public: the inputs that batch_clipping puts beside each sample.
    collate: makes one batch of a list of samples, for data sets whose samples cannot be stacked.
    spent: what was released from these data before; it counts towards ``epsilon`` and stands in the statement.
    ledger: where this run is recorded, behind what it holds already, which counts too.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model first, an nn.Module, got {type(model).__name__}: write make_private(model, optimizer, "
            "data, …)"
        )
    _check_loss(loss)
    # first what needs no data, then what needs few, then the noise, whose calibration takes seconds
    _refuse_compiled(model)
    refuse_modules(model)
    _refuse_ranks(model)
    parameters = trainable(model)
    _check_optimizer(optimizer, model, parameters)
    _warn_of_narrow(parameters)
    delta = fraction("delta", delta, open_end=True)
    if (epochs is None) == (steps is None):
        raise InputError(f"say how long to train by {_either(epochs)} epochs or steps; write for instance epochs=20")
    if (epsilon is None) == (noise_multiplier is None):
        raise InputError(
            f"say how private by {_either(epsilon)} epsilon or noise_multiplier; write for instance epsilon=3"
        )
    asked = positive("noise_multiplier", noise_multiplier or 0) if epsilon is None else positive("epsilon", epsilon)
    one_of("accountant", accountant, ACCOUNTANTS)
    chosen = methods.parse(method) if isinstance(method, str) else methods.flat() if method is None else method
    if not isinstance(chosen, Method):
        raise InputError(f"expected a method such as clipwise.psac(), got {method!r}")
    phases = chosen.phases
    for phase in phases:
        check_weights(phase, parameters)  # also a block that no parameter falls in: now, not after some steps
    stream: Stream = SecureStream() if noise == "secure" else SeededStream(_seed(noise))
    after = postprocess.parse(post) if isinstance(post, str) else identity() if post is None else post
    if not isinstance(after, Post):
        raise InputError(f"expected a post-processing such as clipwise.postprocess.heavy_ball(0.9), got {post!r}")
    dataset = as_dataset(data, collate)
    rows, batch = len(dataset), whole("batch", batch)
    if batch > rows:
        raise InputError(
            f"batch must be at most the {rows} samples of the data, got {batch}: the rate is batch/samples"
        )
    rate = batch / rows
    warn_of_copies(dataset)
    with kept(()):
        refuse_shared(dataset, lambda: seeded(0))
    if delta >= 1 / rows:
        warnings.warn(
            f"delta={delta:g} is not below 1/samples = {1 / rows:.2g}: it would allow a sample's publication",
            stacklevel=3,
        )
    count = whole("steps", steps) if steps is not None else max(1, round(positive("epochs", epochs or 0) / rate))
    size = _chunk(chunk, batch, rows, compile)
    for phase in phases:
        if phase.companions and public is None:
            name = [part.name for part in phase.parts() if part.companions][-1]  # the innermost: not its schedule
            raise InputError(f"{name} needs public inputs, got none; write public=a tensor of them")
        if phase.companions and public is not None:
            refuse_private(public, dataset)
        if phase.recall is not None and batch < rows:
            raise InputError(
                f"{phase.name} is for full batches, since every sample remembers every step: expected batch={rows}, "
                f"all samples, got {batch}; write batch={rows}, or use inner_momentum"
            )
    for name, book in (("spent", spent), ("ledger", ledger)):
        if not isinstance(book, Ledger | None):
            raise InputError(
                f"{name} must be a ledger, got {book!r}: write {name}=clipwise.Ledger(PATH of ledger.jsonl)"
            )
    held = [] if ledger is None else ledger.entries
    added = [] if spent is None or spent is ledger else spent.entries
    earlier = [*held, *added]
    if trained_elsewhere(model, earlier):
        warnings.warn(
            "this model was trained by a private run before, and the statement of this one will not count it: if its "
            "data were the same, write spent=that run's ledger",
            stacklevel=3,
        )
    if self_test and not any(phase.companions for phase in phases):  # a model of units takes no single rows
        _try_loss(model, loss, dataset)
    plan = DicePlan.of(chosen, float(batch), rows)
    sigma = asked if epsilon is None else _calibrated(plan, asked, delta, rate, count, accountant, earlier)
    private = Private(
        model,
        optimizer,
        dataset,
        loss=loss,
        method=chosen,
        noise_multiplier=sigma,
        delta=delta,
        steps=count,
        expected_batch=float(batch),
        chunk=size,
        stream=stream,
        ledger=Ledger() if ledger is None else ledger,
        accountant=accountant,
        self_tested=self_test,
        compile=compile,
        post=after,
        views=views,
        public=public,
        earlier=earlier,
    )
    private.ledger.extend(added)
    if chunk == "auto" or (chunk is None and not compile):
        private.fit_chunk()  # before the self-test, which looks at as many samples as a chunk holds
    private.test_mode()
    return private


class Privacy(TypedDict, total=False):
    """What ``train`` hands on to ``make_private``: it has the other arguments itself, and a ledger in its folder."""

    method: Method | str | None
    epsilon: float | None
    delta: float
    noise_multiplier: float | None
    epochs: float | None
    steps: int | None
    batch: int
    chunk: int | Literal["auto"] | None
    noise: str | int
    accountant: str
    self_test: bool
    compile: bool
    post: Post | str | None
    views: Views | None
    public: Tensor | None
    collate: Callable[[list[Any]], Batch] | None
    spent: Ledger | None


def _check_loss(loss: Any) -> None:
    """Refuse what is no loss(model, batch), such as a criterion of outputs and labels."""
    criterion = isinstance(loss, nn.Module) or getattr(loss, "__module__", None) == nn.functional.__name__
    if criterion or not callable(loss) or not _takes_two(loss):
        raise InputError(
            f"loss must be a function loss(model, batch) with one value per sample, got "
            f"{getattr(loss, '__name__', type(loss).__name__)}; write for instance clipwise.cross_entropy, or lambda "
            "model, batch: criterion(model(batch[0]), batch[1]) with a criterion of reduction='none'"
        )
    if hasattr(loss, "_torchdynamo_orig_callable"):
        raise InputError(
            "expected the loss itself, got what torch.compile made of it: its per-sample gradients cannot be followed; "
            "pass the function that was compiled, and write make_private(…, compile=True)"
        )


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature that can be read
        return True
    return True


def _calibrated(
    plan: DicePlan | None,
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
    accountant: str,
    earlier: list[tuple[Event, int]],
) -> float:
    if plan is None and not earlier:
        return calibrate(epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, accountant=accountant)

    def entries(noise: float) -> list[tuple[Event, int]]:
        return [*earlier, *planned(plan, noise, rate, steps)]

    if earlier and spent_on(earlier, delta, accountant) >= epsilon:
        raise InputError(
            f"epsilon={epsilon:g} is spent: what was released before costs "
            f"{rounded_up(spent_on(earlier, delta, accountant))}; write a larger epsilon"
        )
    return least_noise(entries, epsilon, delta, accountant)


def _either(one: float | None) -> str:
    return "one of" if one is None else "only one of"


def _chunk(chunk: int | str | None, batch: int, rows: int, compile: bool) -> int:
    """How many rows go through the model at a time; a compiled chunk holds nearly every Poisson batch whole."""
    if isinstance(chunk, Integral):
        return whole("chunk", chunk)
    if chunk not in (None, "auto"):
        raise InputError(f"chunk must be a whole number or 'auto', got {chunk!r}")
    if compile and chunk == "auto":
        raise InputError("expected chunk as a number with compile=True, since its graphs are of one size, got 'auto'")
    return min(rows, math.ceil(batch + 4 * math.sqrt(batch))) if compile else CHUNK


def _seed(noise: str | int) -> int:
    if isinstance(noise, bool) or not isinstance(noise, Integral):
        raise InputError(f"noise must be 'secure' or a seed (a whole number), got {noise!r}")
    return int(noise)


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse a model whose layers cannot be followed, since it was compiled by others."""
    for name, module in model.named_modules():
        place = name or "the model"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"expected the model itself, got one of which torch.compile made another ({place}): its per-sample "
                "gradients cannot be followed; pass the model that was compiled, and write make_private(…, "
                "compile=True)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"expected a model in Python, got TorchScript ({place}), whose layers cannot be followed; pass the "
                "model that was scripted or traced"
            )


def _refuse_ranks(model: nn.Module) -> None:
    """Refuse several processes: each would draw noise of its own, and a ledger would count its own releases alone."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if ranks > 1:
        raise Refused(
            f"a private run is one process, got one of {ranks} ranks: noise drawn once per rank, or twice the same, is "
            "not the noise that ε is computed from; train in one process, without torch.distributed"
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise Refused(
            f"expected a model on one device, got {type(model).__name__}, which splits batches; write model.module"
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise InputError("the model has no trainable parameter; write requires_grad_(True) on what is to be trained")
    lazy = [name for name, p in parameters.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise InputError(f"{lazy[0]} has no shape yet: send one batch through the model before, model(x[:2])")
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"expected one optimizer of torch's, got {type(optimizer).__name__}: write "
            "torch.optim.SGD(model.parameters(), lr=0.5), with groups of parameters for several settings"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.SparseAdam) or (closure is not None and closure.default is closure.empty):
        raise InputError(
            f"{type(optimizer).__name__} cannot make a step of one noisy gradient: it "
            + ("takes sparse ones" if isinstance(optimizer, torch.optim.SparseAdam) else "computes losses again itself")
            + "; write for instance torch.optim.Adam"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if missing:
        raise InputError(
            f"the optimizer does not hold the trainable parameter {missing[0]}, so it would never move; "
            "write optimizer = Optimizer(model.parameters(), …), or freeze it with requires_grad_(False)"
        )
    others = len(held - {id(p) for p in model.parameters()})
    if others:
        warnings.warn(
            f"the optimizer holds {others} parameters that are not the model's: this run does not train them, and its "
            "ε says nothing about them; write optimizer = Optimizer(model.parameters(), …)",
            stacklevel=4,
        )


def _warn_of_narrow(parameters: Mapping[str, Tensor]) -> None:
    narrow = [p.dtype for p in parameters.values() if p.dtype in HALF]
    if narrow:
        warnings.warn(
            f"the weights are {_short(narrow[0])}, in which small updates round away: keep them in float32, "
            "model.float(), and compute under torch.autocast in the loss; in the command, write --precision bf16",
            stacklevel=4,
        )


def _try_loss(model: nn.Module, loss: Loss, data: RowDataset) -> None:
    """Two rows through the loss: a wrong shape or format is an error before the noise is calibrated."""
    own = next(iter(trainable(model).values()))
    with restored(model), torch.enable_grad():  # as in training
        with stacked():
            rows = mapped(data.rows(torch.arange(min(2, len(data)))), lambda t: t.to(own.device))
        try:
            losses_of(model, loss, rows)
        except RuntimeError as error:
            other = next((t.dtype for t in tensors(rows) if t.is_floating_point()), own.dtype)
            if other == own.dtype or "type" not in str(error):
                raise
            write = f"model.to({other})" if own.dtype in HALF else f"x.to({own.dtype})"
            raise InputError(f"the model is {_short(own.dtype)}, the data {_short(other)}: write {write}") from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
