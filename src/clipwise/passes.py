"""What goes through the model: a step's samples are read, put on its device and become gradients, chunk by chunk.

Receives: a model with its loss, data, and how many rows go through the model at a time.
Gives: Passes; PublicState, what a step may look at beside its own samples; stacked, in which samples are read;
fingerprint, by which the same samples are known again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.data import RowDataset
from clipwise.engine import ChunkEngine, Views, one_by_one
from clipwise.methods import Method
from clipwise.randomness import Stream
from clipwise.records import Capture, SampleGradients, batch_size, device_of
from clipwise.records.chance import kept, seeded
from clipwise.records.compiled import CompiledCapture
from clipwise.records.memory import free_bytes, largest_chunk
from clipwise.records.states import Buffers, unmoved
from clipwise.records.trees import on_device, tensors
from clipwise.sampling import CHUNK, chunks, largest_batch, units
from clipwise.types import Batch, Gradient, InputError, Refused


@contextmanager
def stacked() -> Iterator[None]:
    """Within it, samples that cannot be stacked are an error that says what to write."""
    try:
        yield
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise InputError(
            "the samples have different shapes, so they cannot be stacked; write collate=a function that makes one "
            "batch of a list of samples, with torch.nn.utils.rnn.pad_sequence for instance, and let the model mask the "
            "padding"
        ) from error


def fingerprint(data: RowDataset, samples: Tensor) -> bytes:
    """SHA-256 of these samples in their order, whatever is drawn at random in reading them. Not private."""
    found = hashlib.sha256()
    places = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with kept([torch.device("cuda", place) for place in places]):  # a seed is every device's
        seeded(0)  # what is drawn is drawn alike
        for piece in chunks(samples, CHUNK):
            for column in tensors(data.rows(piece)):
                found.update(column.to_dense().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()


@dataclass(frozen=True)
class PublicState:
    """What later steps may look at: made of released values only."""

    past: tuple[Gradient, ...] = ()  # θ_{t−1}, θ_{t−2}, …
    released: Gradient | None = None  # the last release, over the expected number of units
    post: Any = None  # the post-processing's own


AT_START = PublicState()  # before the first step


@dataclass
class Passes:
    """Samples by their numbers, and what a method makes of them."""

    capture: Capture
    data: RowDataset
    expected_batch: float
    chunk: int  # rows that go through the model at a time
    fast: CompiledCapture | None = None
    views: Views | None = None
    public: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """What the rows go through."""
        return self.capture.model

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return device_of(self.model)

    def at_once(self, method: Method) -> int:
        """Samples in a chunk, each of which may be several rows."""
        return max(1, self.chunk // method.rows)

    def most(self, method: Method) -> int:
        """The most samples that will go through the model together, in nearly every step."""
        return min(largest_batch(self.expected_batch), self.at_once(method))

    def fit_chunk(self, method: Method) -> None:
        """As many rows at a time as the GPU's memory holds, at most a batch; a processor keeps to small chunks."""
        if self.device.type != "cuda":
            return
        with unmoved(self.model):
            fit = largest_chunk(
                lambda some: method.gradients(self.engine(torch.arange(batch_size(some), device="cpu"), 0), some),
                self.rows(torch.arange(min(32, len(self.data)), device="cpu")),
                most=largest_batch(self.expected_batch),
                # every past iterate's records are kept beside the others; there are none yet to measure
                room=free_bytes(self.device) // (1 + method.past),
            )
        self.chunk = fit * method.rows

    def rows(self, samples: Tensor) -> Batch:
        """The data of these samples, on the model's device."""
        with stacked():
            rows = self.data.rows(samples)
        return self.placed(rows, len(samples))

    def placed(self, rows: Batch, samples: int) -> Batch:
        """These rows on the model's device, if they are one for each sample."""
        rows = on_device(rows, self.device)
        if batch_size(rows) != samples:
            raise Refused(
                f"expected one row per sample, got {batch_size(rows)} rows for {samples} samples: a sample "
                "in several rows has that many times the sensitivity; give each sample one row"
            )
        return rows

    def engine(self, samples: Tensor, seed: int, state: PublicState = AT_START) -> ChunkEngine:
        """Where a method's probe looks from, for these samples in one step."""
        return ChunkEngine(
            self.capture,
            samples,
            seed,
            state.past,
            state.released,
            own_views=None if self.views is None else one_by_one(self.views, samples, seed),
            public=self.public,
            fast=self.fast,
        )

    def gradients(
        self, method: Method, samples: Tensor, stream: Stream, state: PublicState, buffers: Buffers
    ) -> Iterator[tuple[Tensor, SampleGradients]]:
        """Samples and their v_i, chunk by chunk; units of several samples come whole.

        Each chunk meets the same ``buffers``, and the last one's stay: what a pass writes into them (a count of passes,
        a spectral norm's vectors) would tell how many chunks there were, and so how many samples.
        """
        size = self.at_once(method)
        # one seed for the step: a sample's views and companions are its own, whatever the chunks
        seed = int(stream.uniform(1).item() * 2**53) if method.probe is not None else 0
        if method.unit == 1:
            for piece in chunks(samples, size):
                buffers.put_back()
                yield piece, probed(method, self.engine(piece, seed, state), self.rows(piece))
            return
        for padded, keep in units(samples, round(self.expected_batch / method.unit), size, stream):
            piece = padded.flatten()
            buffers.put_back()
            found = probed(method, self.engine(piece, seed, state), self.rows(piece))
            # the group's expected size, a public constant, in the place of its own
            yield piece, (1 / method.unit) * found.masked(keep.flatten().to(self.device)).merged(padded.shape[1])


def probed(method: Method, engine: ChunkEngine, rows: Batch) -> SampleGradients:
    """The method's v_i of the engine's samples, one for each."""
    found = engine.of(method, rows)
    if found.samples != len(engine.keys):
        raise Refused(
            f"expected one gradient per sample, got {found.samples} for {len(engine.keys)} samples: a sample in "
            "several has that many times the sensitivity; let the method's probe give one for each row"
        )
    return found
