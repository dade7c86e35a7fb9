"""Models, losses, optimizers and methods that cannot be trained privately: each is refused with what to write instead.

Receives: what the user gives to ``make_private``, before any data are read; and what it has become in a step.
Gives: check_model, the model's trainable parameters; try_loss, with two rows; check_weights, of a method;
refuse_inference and refuse_gradients, at every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise.data import RowDataset
from clipwise.methods import Block, Method
from clipwise.passes import stacked
from clipwise.records import Loss, trainable
from clipwise.records.checks import losses_of, refuse_kept_from_first, refuse_modules
from clipwise.records.kernels.gram import HALF
from clipwise.records.states import HOOKS, restored, twin
from clipwise.records.trees import on_device, tensors
from clipwise.types import InputError, Refused, positive, warn

OTHERS = 16  # rows that a model is shown after its first ones
MANY, APART = 8193, 1024  # norms that a method weighs together as a test, more than a batch has; of these, some alone


def check_model(model: nn.Module, loss: Loss, optimizer: Optimizer) -> Mapping[str, Tensor]:
    """The model's trainable parameters, if it can be trained privately with this loss and optimizer."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model first, an nn.Module, got {type(model).__name__}: write make_private(model, optimizer, "
            "data, …)"
        )
    _check_loss(loss)
    _refuse_compiled(model)
    refuse_modules(model)
    _refuse_parallel(model)
    parameters = trainable(model)
    _check_optimizer(optimizer, model, parameters)
    _refuse_looking(optimizer, model)
    refuse_inference(parameters)
    _refuse_imprecise(parameters)
    _warn_of_narrow(parameters)
    return parameters


def refuse_inference(parameters: Mapping[str, Tensor]) -> None:
    """Refuse inference mode, and parameters that were made in it: nothing there has a gradient."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "training needs gradients, which there are none of under torch.inference_mode(): make the run and its "
            "steps outside of it"
        )
    made = [name for name, p in parameters.items() if p.is_inference()]
    if made:
        raise InputError(
            f"{made[0]} was made under torch.inference_mode() and can have no gradient: make the model outside of it"
        )


def refuse_gradients(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Refuse a step of an optimizer that lacks a trained parameter, or whose parameters hold gradients already."""
    groups = (group["params"] for group in optimizer.param_groups)  # frozen ones too
    held = {f"number {i} of the optimizer": p for i, p in enumerate(p for group in groups for p in group)}
    ids = {id(p) for p in held.values()}
    new = [name for name, p in parameters.items() if id(p) not in ids]
    if new:
        raise InputError(
            f"the parameter {new[0]} is not in the optimizer, so no step would move it: was a module exchanged? "
            "Make a new run with an optimizer of the model's parameters, and spent=private.ledger"
        )
    left = [name for name, p in {**parameters, **held}.items() if p.grad is not None]
    if left:
        raise Refused(
            f"the parameter {left[0]} holds a gradient that has no noise; private.step computes its own: "
            "remove loss.backward(), or write optimizer.zero_grad() before the step"
        )


def try_loss(model: nn.Module, loss: Loss, data: RowDataset, most: int = OTHERS) -> None:
    """Two rows through the loss: a wrong shape or format is an error before the noise is calibrated.

    It is the first that the model sees of the data: what it keeps of its first batch, or of others, is refused. At
    ``most`` so many rows go through the model at a time.
    """
    own, fresh = next(iter(trainable(model).values())), twin(model)
    places = torch.arange(len(data), device="cpu")
    behind = places[2:][:: max(1, (len(data) - 2) // OTHERS)][: min(most, OTHERS)]
    with restored(model), torch.enable_grad():  # as in training
        with stacked():
            some = (places[:2], behind if len(behind) else places)
            rows, others = (on_device(data.rows(each), own.device) for each in some)
        try:
            losses_of(model, loss, rows)
        except RuntimeError as error:
            # whole numbers are labels or tokens, unless there is nothing else
            formats = [t.dtype for t in tensors(rows)]
            whole = own.dtype if any(isinstance(part, nn.Embedding) for part in model.modules()) else formats[0]
            other = next((each for each in formats if each.is_floating_point), whole)
            if other == own.dtype or "type" not in str(error):
                shapes = ", ".join(str(list(t.shape)) for t in tensors(rows))
                error.add_note(f"clipwise gave the loss and the model the first two samples, tensors of {shapes}")
                raise
            write = f"model.to({other})" if own.dtype in HALF else f"x.to({own.dtype})"
            raise InputError(f"the model is {_short(own.dtype)}, the data {_short(other)}: write {write}") from error
        with suppress(torch.cuda.OutOfMemoryError):  # it is not known yet how many rows the memory holds
            refuse_kept_from_first(model, fresh, loss, rows, others)


def check_weights(method: Method, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights or counts that follow more than a gradient's own norm: one sample would move the others' terms."""
    norms = torch.logspace(-2, 2, MANY, device=next(iter(parameters.values())).device)
    for phase in method.phases:
        for block in phase.blocks(tuple(parameters)):
            positive("bound", block.bound)
            _check_each(phase, "weights", block.weigh, norms)
            _warn_of_cut(phase, block, norms[::APART])
        if phase.count is not None:
            _check_each(phase, "counts", phase.count.of, norms)


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


def _refuse_parallel(model: nn.Module) -> None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise Refused(
            f"expected the model itself, got {type(model).__name__}, which splits batches or adds up gradients without "
            "noise: write model.module; for several GPUs make the run in as many processes, with torchrun"
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise InputError("the model has no trainable parameter; write requires_grad_(True) on what is to be trained")
    lazy = [name for name, p in parameters.items() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise InputError(f"{lazy[0]} has no shape yet: send one batch through the model before, model(x[:2])")
    imaginary = [name for name, p in parameters.items() if p.is_complex()]
    if imaginary:
        raise InputError(
            f"{imaginary[0]} must be real, since norms and noise are of real numbers, got a complex parameter: keep "
            "its parts, nn.Parameter(torch.view_as_real(…)), and write torch.view_as_complex(…) of it in forward"
        )
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
        warn(
            f"the optimizer holds {others} parameters that are not the model's: this run does not train them, and its "
            "ε says nothing about them; write optimizer = Optimizer(model.parameters(), …)"
        )


def _refuse_looking(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that hooks itself into the model: what it sees there of a batch has no noise."""
    for name, module in model.named_modules():
        hooks = (hook for kind in HOOKS for hook in getattr(module, kind).values())
        if any(getattr(hook, "__self__", None) is optimizer for hook in hooks):
            raise Refused(
                f"{type(optimizer).__name__} has a hook on {name or 'the model'}, as K-FAC has, and so sees private "
                "samples' activations or gradients without noise; write an optimizer of released gradients alone, such "
                "as torch.optim.Adam"
            )


def _refuse_imprecise(parameters: Mapping[str, Tensor]) -> None:
    """Refuse a device without float64, as Apple's GPUs are: the bound is proved for sums in float64."""
    device = next(iter(parameters.values())).device
    try:
        torch.ones(1, device=device).double()
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"private sums are added in float64, and the device {device}, where the model is, has none ({error}): "
            "write model.to('cpu')"
        ) from error


def _warn_of_narrow(parameters: Mapping[str, Tensor]) -> None:
    narrow = [p.dtype for p in parameters.values() if p.dtype in HALF]
    if narrow:
        warn(
            f"the weights are {_short(narrow[0])}, in which small updates round away: keep them in float32, "
            "model.float(), and compute under torch.autocast in the loss; in the command, write --precision bf16"
        )


def _check_each(method: Method, what: str, function: Callable[[Tensor], Tensor], norms: Tensor) -> None:
    alone, together = [function(norm) for norm in norms[::APART].split(1)], function(norms.flip(0))
    if not isinstance(together, Tensor) or together.shape != norms.shape:
        got = list(together.shape) if isinstance(together, Tensor) else type(together).__name__
        raise InputError(f"{method.name} must give {what} [n] for norms [n], got {got}: write norms.new_full(…)")
    if not torch.allclose(torch.cat(alone), together.flip(0)[::APART], rtol=1e-3, atol=0, equal_nan=True):
        raise Refused(
            f"the {what} of {method.name} depend on other samples' norms too, or change from call to call: one sample "
            f"would move the others' terms; make each of the {what} from its own norm alone"
        )


def _warn_of_cut(method: Method, block: Block, norms: Tensor) -> None:
    """Warn where ``weigh`` will cut a weight: what is trained is then not the formula that its author wrote."""
    there = block.bound * norms  # from far below the bound to far above it
    weights = block.weigh(there)
    longer = (weights.abs() * there > block.bound * 1.001).nonzero().flatten().tolist()
    if longer:
        norm, weight = float(there[longer[0]]), float(weights[longer[0]])
        warn(
            f"{method.name} does not keep its bound of {block.bound:g}: a gradient of norm {norm:.3g} gets the weight "
            f"{weight:.3g}, and the term {abs(weight) * norm:.3g}; such weights are cut to bound/norm, so that what is "
            "trained is not that formula: write the largest value of weight · norm as its bound"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
