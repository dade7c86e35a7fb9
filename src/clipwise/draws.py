"""What models and data draw in a step, such as dropout's masks, is drawn as secretly as its noise.

Receives: a step's own stream, and what it computes.
Gives: SecretDraws, which computes it with every generator seeded from the stream, where something draws at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from clipwise.data import RowDataset, Samples
from clipwise.randomness import Stream
from clipwise.records import device_of
from clipwise.records.chance import drawn_on, kept, seeded, watched
from clipwise.records.states import Modes

T = TypeVar("T")


class SecretDraws:
    """Computes steps with all generators seeded from the run's own secret stream, and puts the generators back.

    A row's mask depends on the row's place in the batch: whoever could foresee the draws, from a seed that the user
    set, could tell from one sample's gradient how many others were drawn before it.

    Seeding takes time, so it is left out where nothing draws: a model without dropout modules (one of p = 0 may be
    turned on later), on data that are tensors, whose first step in this mode drew nothing. Should torch's generator be
    used in a later step all the same, or NumPy's or Python's, that step is computed again, seeded.
    """

    def __init__(self, model: nn.Module, data: RowDataset) -> None:
        """Nothing is known of them yet."""
        self._model, self._reading_draws = model, isinstance(data, Samples)
        self._draws: dict[Modes, bool] = {}  # by the model's mode, whether a step draws at random

    def computed(self, stream: Stream, mode: Modes, compute: Callable[[], T], *, empty: bool) -> T:
        """What ``compute`` gives in this step; nothing is learnt from an ``empty`` step about whether others draw."""
        device = device_of(self._model)
        if not self._draws.get(mode, True):
            before = drawn_on(device)
            found = compute()
            if drawn_on(device) == before:
                return found
            self._draws[mode] = True  # what it drew could be foreseen
        with kept({device} if device.type == "cuda" else set()):
            seeded(stream.seed())
            if empty or mode in self._draws:
                return compute()
            found, drew = watched(compute)
            drops = any(isinstance(module, _DropoutNd) for module in self._model.modules())
            self._draws[mode] = drops or self._reading_draws or drew
            return found
