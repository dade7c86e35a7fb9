"""What other libraries call what is here: whoever writes their name is told what to write.

Receives: a name that is not here, of an option, of something on a run, or in the module.
Gives: what to write for it. None of these names works: two names for one thing would be one too many.
"""

from __future__ import annotations

_CHUNKS = "nothing for it: batch is the whole step's, and chunk=64 how many rows go through the model at a time"
_OPTIMIZER = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
_EVALUATE = 'evaluate=lambda model: {"accuracy": …}, which train calls at every evaluate_every-th step'
_PROGRESS = "progress=a function of (private, row), which train calls after every step"
_AUTOCAST = "nothing for it: use torch.autocast within the loss, for instance in bfloat16, which needs no scaler"
_WEIGHTS = "the weights into a loss(model, batch) of your own, chosen without counting private labels"
_SAVED = "folder=…: train saves the run there, and evaluate_every steps lie between two checkpoints"
_DATA = "data=loader.dataset, and batch=… for the expected size of a step"
_HELD_OUT = "nothing for it: data is what is trained on, and evaluate=… of train measures on other rows"

# of Opacus, Hugging Face's Trainer, Keras and Lightning
OPTIONS = {
    **dict.fromkeys(("max_grad_norm", "clip_norm", "clip", "l2_norm_clip"), "method=clipwise.flat(1.0)"),
    **dict.fromkeys(("data_loader", "dataloader", "train_loader", "train_dataloader"), _DATA),
    "train_dataset": "data=…",
    "target_delta": "delta=…",
    "sigma": "noise_multiplier=…",
    "noise_generator": "noise=…, a seed for tests; without it the noise is secure",
    "secure_mode": "nothing for it: noise is from a secure generator unless noise=SEED is given",
    **dict.fromkeys(("max_physical_batch_size", "physical_batch_size", "max_batch_size"), "chunk=…"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _CHUNKS),
    "per_device_train_batch_size": "batch=…, the expected size of a whole step",
    **dict.fromkeys(("poisson_sampling", "shuffle"), "nothing for it: every batch is a Poisson draw"),
    "num_workers": "nothing for it: rows are read in the training process; load slow data into tensors first",
    **dict.fromkeys(("sample_rate", "sampling_rate"), "batch=…, which is the rate times the number of samples"),
    **dict.fromkeys(
        ("criterion", "loss_fn", "loss_reduction"), "loss=…, a function loss(model, batch) with one value per sample"
    ),
    **dict.fromkeys(("class_weight", "class_weights", "sample_weight"), _WEIGHTS),
    "num_train_epochs": "epochs=…",
    **dict.fromkeys(("learning_rate", "lr", "weight_decay"), _OPTIMIZER),
    **dict.fromkeys(("eval_dataset", "eval_data", "val_data", "validation_data", "test_data"), _HELD_OUT),
    **dict.fromkeys(("compute_metrics", "metrics"), _EVALUATE),
    "eval_steps": "evaluate_every=…",
    **dict.fromkeys(("callback", "callbacks", "logger", "logging_steps", "verbose"), _PROGRESS),
    **dict.fromkeys(("fp16", "bf16", "amp", "autocast", "precision"), _AUTOCAST),
    **dict.fromkeys(("output_dir", "checkpoint", "checkpoint_every", "save_every", "save_steps"), _SAVED),
    "resume_from_checkpoint": "resume=True, with the folder=… of the run",
    "device": "nothing for it: move the model, and the data if they fit, by .to(device)",
    "seed": "torch.manual_seed(0) before the model is built, for its first weights; noise is secret unless noise=SEED",
}

_METRICS = "nothing for it: the training loss is private, and no ε covers it; measure on held-out rows"
_STEP = "private.step(batch), which makes gradients, noise and the optimizer's step"
_STATE = "private.model.state_dict() and private.optimizer.state_dict(), and give the ledger a file (docs/resuming.md)"
# on what make_private gives
PRIVATE = {
    "get_epsilon": "private.epsilon(), or private.epsilon(δ)",
    "spent": "private.epsilon() for ε, private.ledger for what it is made of",
    "get_noise_multiplier": "private.noise_multiplier",
    "max_grad_norm": "private.method",
    "module": "private.model",
    "sample_rate": "private.sampling_rate",
    "report": "print(private.statement().text())",
    **dict.fromkeys(("loss", "accuracy", "history"), _METRICS),
    **dict.fromkeys(("backward", "zero_grad", "virtual_step"), _STEP),
    **dict.fromkeys(("state_dict", "load_state_dict", "save", "save_checkpoint", "load_checkpoint"), _STATE),
    **dict.fromkeys(("loader", "dataloader", "data_loader"), "private.batches()"),
    **dict.fromkeys(("train", "fit", "run"), "for batch in private.batches(): private.step(batch), or clipwise.train"),
    **dict.fromkeys(("parameters", "eval"), "private.model, which is your own"),
}
# on what train gives
RUN = {
    "get_epsilon": "run.epsilon",
    **dict.fromkeys(("history", "results", "losses"), "run.metrics, one row for each time that evaluate was called"),
    **dict.fromkeys(("accuracy", "loss", "score"), 'run.metrics[-1]["…"], with what evaluate gave'),
    "predict": "run.model, which is your own: run.model.eval()(x)",
    **dict.fromkeys(("save", "state_dict"), "train(…, folder=…), or torch.save(run.model.state_dict(), …)"),
    "summary": "print(run.report)",
}

_MAKE = "clipwise.make_private(model, optimizer, data, loss=loss, …)"
_CALIBRATE = "clipwise.calibrate(epsilon=…, delta=…, sampling_rate=…, steps=…)"
# in the module itself
NAMES = {
    **dict.fromkeys(("PrivacyEngine", "make_private_with_epsilon", "GradSampleModule", "DPOptimizer"), _MAKE),
    "ModuleValidator": "nothing for it: what cannot be trained is refused, with the layer to write instead",
    "BatchMemoryManager": "chunk=64 in make_private: how many rows go through the model at a time",
    **dict.fromkeys(("Trainer", "fit"), "clipwise.train(model, loss, data, …)"),
    **dict.fromkeys(("get_noise_multiplier", "noise_multiplier"), _CALIBRATE),
    **dict.fromkeys(("RDPAccountant", "Accountant"), 'accountant="rdp" in make_private, or clipwise.epsilon(…)'),
    **dict.fromkeys(("load", "load_data"), "clipwise.data.load(…)"),
    **dict.fromkeys(("compare", "predict", "cite", "advise"), "it in a shell: clipwise {name} --help"),
}


def lacking(what: str, name: str, elsewhere: dict[str, str]) -> AttributeError:
    """The error for a name that is not there, with what to write where another library has it."""
    write = f": write {elsewhere[name].format(name=name)}" if name in elsewhere else ""
    return AttributeError(f"{what} has no attribute {name!r}{write}")
