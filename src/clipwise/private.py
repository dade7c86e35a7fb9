"""A model under private training, for a loop of your own: sampling → step → release → ledger → optimizer.

Receives: what goes through the model, an optimizer, a method, and what was decided of noise, steps and accounting.
Gives: Private: its batches, its steps, its ε; ``clipwise.start.make_private`` checks everything and makes one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.optim import Optimizer

from clipwise import ranks, self_test
from clipwise.accounting import Ledger
from clipwise.accounting.dice import DicePlan, planned
from clipwise.accounting.ledger import totals
from clipwise.draws import SecretDraws
from clipwise.elsewhere import PRIVATE, lacking
from clipwise.engine import ChunkEngine
from clipwise.guard import Guarded
from clipwise.methods import Method
from clipwise.noise import release
from clipwise.passes import AT_START, Passes, PublicState, fingerprint
from clipwise.postprocess import Post
from clipwise.randomness import Stream
from clipwise.records import SampleGradients, trainable, widest
from clipwise.records.checks import refuse_modules
from clipwise.records.states import Buffers, Modes, modes, restored
from clipwise.records.switches import switches
from clipwise.records.tf32 import full_on_cpu
from clipwise.records.trees import on_device
from clipwise.refusals import check_weights, refuse_gradients, refuse_inference
from clipwise.report import Statement
from clipwise.sampling import poisson
from clipwise.step import Momenta, Observed, fed_back, private_sum, zeros
from clipwise.trained import note_trained, trained_by, trained_elsewhere
from clipwise.types import Batch, Event, Gradient, InputError, Part, PoissonGaussian, PrivateSum, Refused, warn

# what a run cannot change on its way
FIXED = frozenset(
    "model optimizer data steps noise_multiplier sampling_rate expected_batch dice ledger delta accountant "
    "rows_per_person post".split()
)


LONG = 500  # steps of a run in which the self-test, which takes as long as 10 to 50 steps, is repeated twice


@dataclass(frozen=True)
class PoissonBatch:
    """The samples of one step, to be read in chunks; ``Private.step`` takes each one once, in order."""

    step: int
    indices: Tensor = field(repr=False)  # who was drawn is secret: a notebook that shows the batch does not show it
    stream: Stream = field(repr=False)

    def __len__(self) -> int:
        """How many samples were drawn. Not private."""
        return len(self.indices)

    def __getitem__(self, place: object) -> Tensor:
        """Refuse, also to iterate: rows are read by ``Private.step``, in chunks."""
        raise InputError("a batch says which samples were drawn and holds no rows: write private.step(batch)")


class Private:
    """A model under private training: draws batches, makes steps, keeps the ledger.

    Guarantees: every step is recorded in the ledger before the optimizer sees its gradient; the sampling rate, the
    noise multiplier and how a method with private state is accounted are fixed at the start.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change what every step's noise and event are made of."""
        if name in FIXED and name in vars(self):
            raise Refused(f"{name} is fixed at the start, since one statement speaks for the run; make a new run")
        super().__setattr__(name, value)

    def __init__(
        self,
        passes: Passes,
        optimizer: Optimizer,
        *,
        method: Method,
        noise_multiplier: float,
        target: float | None,
        delta: float,
        steps: int,
        stream: Stream,
        accountant: str,
        rows_per_person: int,
        self_tested: bool,
        post: Post,
        earlier: Sequence[tuple[Event, int]],
    ) -> None:
        """Use ``make_private``, which checks and fills in what is missing."""
        self.model, self.optimizer, self.data = passes.model, optimizer, passes.data
        self._passes, self._method, self.ledger = passes, method, Ledger()
        self.steps, self._taken = steps, 0
        self.delta, self.accountant, self.rows_per_person = delta, accountant, rows_per_person
        self._target = target  # the ε that the noise was calibrated for
        self._counted = 0  # releases, as this run knows its ledger
        self.expected_batch = passes.expected_batch
        self.noise_multiplier, self.sampling_rate = noise_multiplier, self.expected_batch / len(self.data)
        self.dice = DicePlan.of(method, self.expected_batch, len(self.data))
        self._begun = 0  # the step that began the first block of a memory in blocks
        self.observed: Observed | None = None  # of the last step; not private
        self.fallbacks: tuple[str, ...] = ()
        self.post = post
        self._stream, self._self_tested = stream, self_tested
        self._state = AT_START
        self._hidden: Gradient | None = None
        self._drawn: PoissonBatch | None = None
        # this process's share of the batch that was drawn, where nobody can change it
        self._indices = torch.zeros(0, dtype=torch.long, device="cpu")
        self._first_method = self._methods_used = str(method)
        self._earlier = earlier
        self._turn, self._process = threading.Lock(), os.getpid()
        self._mode: Modes = ()  # the model's, as it was last looked at
        self._tested: dict[Modes, set[str]] = {}  # those that were self-tested, and what passes wrote to
        # steps before which it is repeated, since some code mixes samples only when it is warm
        self._again = {steps // 10, steps - 1} if steps >= LONG else set[int]()
        self._draws = SecretDraws(self.model, self.data)
        self._warned_of_lost = False
        self._warned_of = trained_by(self.model)  # the other run's ledger: make_private has warned of it
        self._guarded = Guarded(optimizer)
        self._few = self._of_few()

    def __repr__(self) -> str:
        """How far it is, of what."""
        made = f"{self.steps_taken} of {self.steps} steps made, expected batch {self.expected_batch:g}"
        return f"<private training of {type(self.model).__name__} by {self.method}: {made} of {len(self.data)} samples>"

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> NoReturn:
            """A name that is not here is answered by what to write, where other libraries have it."""
            raise lacking("a private run", name, PRIVATE)

        def __iter__(self) -> NoReturn:
            """Refuse to be taken for a loader, or for Opacus' model, optimizer and loader."""
            raise TypeError(
                "a private run is one thing and no loader: write private = clipwise.make_private(…), and then "
                "`for batch in private.batches(): private.step(batch)`"
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse a copy, also a pickled one: it would release more of the same draws into a ledger of its own."""
        raise Refused(
            "a private run cannot be copied or pickled: two would go on from one draw, and the ledger of each would "
            "count its own releases alone; copy the model, private.model, and train it in a new run with "
            "spent=private.ledger; to stop and go on later, write clipwise.train(…, folder=…) and resume=True"
        )

    @property
    def method(self) -> Method:
        """The method as it is at this step."""
        return self._method

    @method.setter
    def method(self, method: Method) -> None:
        before = str(self._method)
        ranks.check_method(method)
        check_weights(method, trainable(self.model))
        if {phase.probe for phase in method.phases} - {phase.probe for phase in self._method.phases}:
            self._tested.clear()  # it takes gradients elsewhere, now or later
        self._go_on_with(method)
        if str(method) != before:  # exchanged by the user: the statement names all that were used
            used = f"{self._methods_used}; from step {self._taken}: {method}"
            self._methods_used = used if self._taken else str(method)

    def _go_on_with(self, method: Method) -> None:
        """Make the next steps by this method, if it samples and accounts for its private state as the one before."""
        plan = DicePlan.of(method, self.expected_batch, len(self.data))
        if plan != self.dice or method.recall != self._method.recall:
            raise Refused(
                f"private state has one bound for a whole run: expected the method {self._method}, or one with the "
                f"same, got {method}; make a new run with spent=private.ledger"
            )
        self._method = method

    @property
    def steps_taken(self) -> int:
        """How many steps were made."""
        return self._taken

    @property
    def state(self) -> PublicState:
        """What later steps may look at."""
        return self._state

    @property
    def hidden(self) -> Gradient | None:
        """What clipping cut off, or one momentum per sample. Private: never released, kept in a file of its own."""
        return self._hidden

    def record_in(self, ledger: Ledger) -> None:
        """Record in this ledger from now on, such as one on file: it holds what was recorded so far, or more."""
        if self._taken or totals(self.ledger.entries) - totals(ledger.entries):
            raise Refused(
                "a ledger only grows: expected one that holds every release of this run's, before its first step, got "
                f"{ledger.releases} releases for {self.ledger.releases}; write new.extend(private.ledger.entries)"
            )
        vars(self)["ledger"] = ledger
        self._counted = ledger.releases

    def batches(self) -> Iterator[PoissonBatch]:
        """The batches of all steps that are left, of all epochs; give each to ``step`` before asking for the next."""
        if self.steps_taken >= self.steps:
            warn(
                f"all {self.steps} steps of this run are taken, so there are no more batches: private.batches() goes "
                "over all epochs; write one loop over it, without a loop over epochs around it"
            )
        return self._batches()

    def _batches(self) -> Iterator[PoissonBatch]:
        while self.steps_taken < self.steps:
            with self._alone():
                if self._drawn is None:  # an unused draw stays: choosing among draws is not Poisson sampling
                    stream = self._stream.at(self.steps_taken)
                    drawn = self._sampled(stream)
                    self._indices = ranks.share(drawn).clone()
                    self._drawn = PoissonBatch(self.steps_taken, drawn, stream)
            yield self._drawn
            if self._drawn is not None:
                raise InputError("the last batch was not used; write private.step(batch) for every batch")

    def step(self, batch: PoissonBatch) -> None:
        """One private update of the model from one Poisson batch."""
        with self._alone():
            self._step(batch)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse what comes while a step is made, from another thread or from within it, or from a forked process."""
        if os.getpid() != self._process:  # a fork is a copy, which nothing but this can refuse
            raise Refused(
                "this process was forked from the one that made this run, whose ledger would not count what is "
                "released here: call make_private in the process that trains"
            )
        if not self._turn.acquire(blocking=False):
            raise Refused(
                "a step of this run is being made, and each begins where the one before it ended: two at once would "
                "use one batch twice, whose ε is not that of two draws; make them one after another, in one thread and "
                "outside of the loss"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _checked(self, batch: PoissonBatch) -> dict[str, Tensor]:
        """The trainable parameters, if this step can be made: whatever the user's code changed since the last one."""
        if not isinstance(batch, PoissonBatch) or batch is not self._drawn:
            raise Refused(
                "step takes each batch of private.batches() once, in order: other batches are not Poisson samples, "
                "and their ε would be wrong; write `for batch in private.batches(): private.step(batch)`"
            )
        parameters = trainable(self.model)
        refuse_inference(parameters)
        fast = self._passes.fast
        if fast is not None and (new := set(parameters).difference(*fast.groups)):
            raise InputError(
                f"{min(new)} is trained only since the run began, and its step is compiled without it: make a new run "
                "with spent=private.ledger, or leave compile=True out"
            )
        if fast is not None:
            fast.refuse_changed()
        self._refuse_other_parameters(parameters)
        refuse_modules(self.model)  # a model.train() since the last step may have woken a BatchNorm
        if self._of_few() != self._few:
            raise Refused(
                f"the data are others than at the start, or in another order, and {self.method.name} knows samples by "
                "their place: one that moves takes part twice; shuffle nothing, since every batch is a draw of all"
            )
        self.test_mode(parameters)
        return parameters

    def _refuse_other_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse a change in which parameters are trained, where something is remembered of each from step to step."""
        method, known = self.method, self.state.released
        if known is None or known.keys() == parameters.keys():
            return
        whose: Method | Post
        if method.past or method.recall is not None or method.feedback is not None:
            whose = method
        elif self.state.post is not None and parameters.keys() - known.keys():  # of one that is gone it may forget
            whose = self.post
        else:
            return
        name = min(known.keys() ^ parameters.keys())
        raise InputError(
            f"{name} is {'no longer' if name in known else 'only now'} trained, and {whose} remembers something of "
            "each parameter from step to step: make a new run with spent=private.ledger, or freeze and unfreeze nothing"
        )

    def _step(self, batch: PoissonBatch) -> None:
        parameters, method = self._checked(batch), self.method
        self._warn_of_other_runs()
        self._warn_of_other_releases()
        private, event, following = self._summed(batch, parameters)
        self._warn_of_lost()
        refuse_gradients(self.optimizer, parameters)  # now: the loss may have called backward() for another model
        self._drawn = None
        # the expected number of units is a public constant; the realised one is not
        units = self.expected_batch / method.unit
        # one format whatever was drawn: several chunks are summed in a wider one
        released = release(private, event, batch.stream, units, widest(parameters.values()))
        self.ledger.record(released.event)  # before anything uses what was released
        self._counted = self.ledger.releases
        # At once: whatever fails below, no later step may draw from this one's group in the same block. And where
        # Ctrl-C comes between these, nothing is remembered of a step that is to be made again.
        self._hidden = None
        self._taken += 1
        self._hidden = following
        self._go_on_with(method.next(released, units))
        note_trained(self.model, self.ledger)
        here = {name: p.detach().clone() for name, p in parameters.items()} if method.past else {}
        past = (here, *self.state.past)[: method.past]
        made = self.post.apply(self.state.post, released.gradient, released.deviation)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
            raise InputError(f"{self.post} must give (state, gradient), got {type(made).__name__}: write it so")
        filtered, update = made
        self._state = PublicState(past, released.gradient, filtered)
        self._update(parameters, update)

    def _summed(
        self, batch: PoissonBatch, parameters: Mapping[str, Tensor]
    ) -> tuple[PrivateSum, Event, Gradient | None]:
        """The batch's sum, the event that its release is, and the private state that it leaves."""
        method, feedback, plan = self.method, self.method.feedback, self.dice
        most = self._passes.at_once(method)
        alone = method.unit == 1 and len(self._indices) <= most

        buffers = Buffers(self.model)

        def computed() -> tuple[PrivateSum, Observed, Momenta | None]:
            momenta = None if method.recall is None else Momenta(method.recall, self._hidden)
            gradients = self._gradients(batch, momenta, buffers)
            return *private_sum(method, parameters, gradients, most=most, alone=alone), momenta

        with full_on_cpu() if self._passes.device.type == "cpu" else nullcontext():
            private, self.observed, momenta = self._draws.computed(
                batch.stream, self._mode, computed, empty=not len(self._indices)
            )
        self._test_written(buffers, parameters)
        private = ranks.added(private, batch.stream, parameters.values())
        if feedback is None or private.residual is None or plan is None:
            following = self._hidden if momenta is None else momenta.following()
            return private, PoissonGaussian(self.noise_multiplier, self.sampling_rate), following
        place = self._place(plan)
        error = zeros(parameters) if self._hidden is None else self._hidden
        (part,) = private.parts
        last = place == plan.groups - 1
        total, following = fed_back(feedback, part.value, error, private.residual, self.expected_batch, last)
        memory = 2 * plan.feedback_norm if plan.memory == "full" else 0.0
        private = PrivateSum((Part(total, plan.sensitivity, part.share),), memory)
        return private, plan.event(self.noise_multiplier, place), following

    def _update(self, parameters: Mapping[str, Tensor], update: Gradient) -> None:
        """One step of the optimizer."""
        for name, parameter in parameters.items():
            got = update.get(name)
            if got is None or got.shape != parameter.shape:
                raise InputError(
                    f"expected an update of {name} of its shape {tuple(parameter.shape)}, got "
                    f"{None if got is None else tuple(got.shape)}: let the post-processing give one tensor for each"
                )
        # copies: an optimizer may write into its gradients, and these are what was released or a filter's state;
        # with the parameters' own strides, so that it can update many at once
        gradients = [torch.empty_like(parameter) for parameter in parameters.values()]
        torch._foreach_copy_(gradients, [update[name] for name in parameters])
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self._guarded.step()

    @property
    def plan(self) -> dict[str, Any]:
        """What may not change when a run is resumed, since one statement speaks for all of it."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "sampling_rate": self.sampling_rate,
            "samples": len(self.data),
            "generator": self._stream.name,
            "method": self._first_method,
            "self_test": self._self_tested,
            "post": str(self.post),
            "spent": [f"{count} × {event}" for event, count in self._earlier],
            "rows_per_person": self.rows_per_person,
        }

    def planned(self, steps: int) -> list[tuple[Event, int]]:
        """What so many steps record."""
        return planned(self.dice, self.noise_multiplier, self.sampling_rate, steps)

    def epsilon(self, delta: float | None = None) -> float:
        """ε spent so far, at the run's δ unless another is given."""
        delta = self.delta if delta is None else delta
        return self.ledger.epsilon(delta, self.accountant, rows_per_person=self.rows_per_person)

    def statement(self) -> Statement:
        """What has been guaranteed so far, and how."""
        return Statement.of(
            self.ledger,
            delta=self.delta,
            accountant=self.accountant,
            rows_per_person=self.rows_per_person,
            sampling_rate=self.sampling_rate,
            expected_batch=self.expected_batch,
            noise_multiplier=self.noise_multiplier,
            generator=self._stream.name,
            method=self._methods_used,
            self_tested=self._self_tested,
            fallbacks=self.fallbacks,
            earlier=self._earlier,
            weights=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainable(self.model).values()})),
        )

    def _sampled(self, stream: Stream) -> Tensor:
        """A Poisson draw of the next step's samples: of all, or of the group whose turn it is (DiceSGD in blocks)."""
        plan = self.dice
        if plan is None or plan.groups == 1:
            return poisson(len(self.data), self.sampling_rate, stream)
        # samples belong to groups by their own number, whoever else is there
        group = torch.arange(self._place(plan), len(self.data), plan.groups, device="cpu")
        return group[poisson(len(group), plan.step_rate, stream)] if len(group) else group

    def _place(self, plan: DicePlan) -> int:
        """Which step of its block the next one is, and so which group of samples it draws from."""
        return (self.steps_taken - self._begun) % plan.groups

    @property
    def methods_used(self) -> str:
        """The methods that steps were made with, as the statement names them."""
        return self._methods_used

    def resumed(self, step: int, method: Method, state: PublicState, hidden: Gradient | None, used: str) -> None:
        """Go on from a checkpoint; ``used`` names the methods so far.

        Releases since the checkpoint, which it does not know, may have used its memory: a second use is paid for by
        "full" alone, so that every other feedback begins anew, with a new block (docs/dicesgd.md, section 4).
        """
        device = self._passes.device  # checkpoints are read to the CPU
        state = PublicState(**on_device(vars(state), device))
        hidden = on_device(hidden, device)
        self._taken, self._state, self._methods_used = step, state, used
        self._go_on_with(method)
        self._begun = step
        self._hidden = hidden if self.dice is None or self.dice.memory == "full" else None
        self._counted = self.ledger.releases

    def test_mode(self, trained: Iterable[str]) -> None:
        """The self-test, unless it was passed with the modules and flags that model and loss have now, and lately."""
        mode, before = modes(self.model, trained) + switches(self.model, self._passes.capture.loss), self._mode
        if mode != before:
            self._passes.capture.plans.clear()  # it may hold its samples in another dimension now
        self._mode = mode
        if late := self._taken in self._again and not self._mostly_lost():
            self._tested.pop(mode, None)
        self._again.discard(self._taken)
        if self._self_tested and mode not in self._tested:
            # restored also where it is refused: its buffers would hold what it was shown
            try:
                with restored(self.model), full_on_cpu():
                    phases = {phase.probe: phase for phase in self.method.phases}.values()
                    written = set().union(*(self_test.run(self._passes, p, self.state) for p in phases))
            except Refused as error:
                if not late:
                    raise
                raise Refused(
                    f"{error}; found only now, when the self-test was repeated after {self._taken} steps: ε may not "
                    "hold for them. To end this run all the same, resume it with self_test=False (--no-self-test), "
                    "which its statement will say"
                ) from error
            self._tested[mode] = written  # only now: a model that cannot be restored is refused too

    def _test_written(self, buffers: Buffers, trained: Iterable[str]) -> None:
        """Repeat the self-test where the step wrote to buffers that no pass of it wrote to, as late statistics do.

        What the step wrote is undone first, so that it is gone whether the model passes now or is refused.
        """
        if self._mode not in self._tested:
            return
        if held := buffers.parameters_written() - self._tested[self._mode]:
            raise Refused(
                f"a forward pass of step {self._taken + 1} wrote into the parameter {min(held)}, as none of the "
                "self-test did: what is made of a batch there, such as a new code for one that nobody uses, is private "
                "data without noise; go back to the model before this step, and write into parameters between steps "
                "alone, nothing but public or released values"
            )
        written = buffers.written()
        if written - self._tested[self._mode]:
            buffers.put_back()
            del self._tested[self._mode]
            try:
                self.test_mode(trained)
            except Refused:
                buffers.remove_new()
                raise
            self._tested[self._mode] |= written

    @functools.cached_property
    def fingerprint(self) -> Tensor:
        """SHA-256 of all samples in their order: 32 bytes, the same whatever the run's chunk. Not private."""
        every = torch.arange(len(self.data), device="cpu")
        return torch.frombuffer(bytearray(fingerprint(self.data, every)), dtype=torch.uint8)

    def _of_few(self) -> bytes:
        """Three samples' fingerprint where it matters which place a sample has: in groups, or with a memory of its own.

        To read all in every step would take longer than the step; who shuffles moves one of three nearly always.
        """
        if self._method.recall is None and (self.dice is None or self.dice.groups == 1):
            return b""
        return fingerprint(self.data, torch.tensor([0, len(self.data) // 2, len(self.data) - 1], device="cpu"))

    def rows(self, samples: Tensor) -> Batch:
        """The data of these samples, on the model's device. Not private."""
        return self._passes.rows(samples)

    def engine(self, samples: Tensor, seed: int) -> ChunkEngine:
        """Where a method's probe looks from, for these samples in this step."""
        return self._passes.engine(samples, seed, self.state)

    def _gradients(self, batch: PoissonBatch, momenta: Momenta | None, buffers: Buffers) -> Iterator[SampleGradients]:
        """v_i chunk by chunk, each sample's with its own momentum where the method has one."""
        found = self._passes.gradients(self.method, self._indices, batch.stream, self.state, buffers)
        for samples, gradients in found:
            self.fallbacks = gradients.fallbacks or self.fallbacks
            yield gradients if momenta is None else momenta.averaged(gradients, samples)

    def _mostly_lost(self) -> bool:
        """Whether most samples of the last step added nothing to it, since the model has diverged."""
        seen = self.observed
        return seen is not None and 0 < seen.samples <= 2 * seen.non_finite

    def _warn_of_lost(self) -> None:
        """Warn of a step to which most samples added nothing; to ask a GPU is to wait for it, so only now and then."""
        seen = self.observed
        often = self._passes.device.type == "cpu" or self._taken % 100 == 0
        if often and not self._warned_of_lost and seen is not None and self._mostly_lost():
            self._warned_of_lost = True
            some = f"{seen.non_finite} of {seen.samples} samples had no finite gradient and added nothing"
            none = "no sample had a finite gradient, so that noise alone was added"
            said = none if seen.non_finite == seen.samples else some
            warn(
                f"in step {self._taken + 1} {said}: the model has diverged, or the data or the loss are not numbers; "
                "write a smaller learning rate, or look at the data and the loss"
            )

    def _warn_of_other_releases(self) -> None:
        others = self.ledger.releases - self._counted
        if others and self._target is not None:
            self._target = None  # said once
            warn(
                f"this run's ledger holds {others} releases of others since it was made, for which its noise was not "
                "calibrated: ε counts them, and all steps together pass the one that was asked for; make one run after "
                "the other, the later one with spent=the earlier one's ledger"
            )

    def _warn_of_other_runs(self) -> None:
        known = trained_by(self.model)
        if known not in (self.ledger, self._warned_of) and trained_elsewhere(self.model, self.ledger.entries):
            self._warned_of = known
            warn(
                "another private run trained this model since, and the statement of this one does not count it: if its "
                "data were the same, make one run after the other, with spent=the earlier one's ledger"
            )
