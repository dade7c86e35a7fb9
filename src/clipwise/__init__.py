"""Differentially private training that measures and reduces the bias of per-sample clipping.

Receives: your model, a loss that gives one value per sample, and your data.
Gives: the public names; each is imported when it is first used, so that ``clipwise calibrate`` starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clipwise.elsewhere import NAMES, lacking

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clipwise import accounting as accounting
    from clipwise import audit as audit
    from clipwise import data as data
    from clipwise import diagnostics as diagnostics
    from clipwise import methods as methods
    from clipwise import models as models
    from clipwise import postprocess as postprocess
    from clipwise.accounting import Ledger as Ledger
    from clipwise.accounting import calibrate as calibrate
    from clipwise.accounting import epsilon as epsilon
    from clipwise.diagnostics import Monitor as Monitor
    from clipwise.diagnostics import clipping_bias as clipping_bias
    from clipwise.diagnostics import measure as measure
    from clipwise.losses import cross_entropy as cross_entropy
    from clipwise.losses import squared_error as squared_error
    from clipwise.methods import METHODS as METHODS
    from clipwise.methods import Method as Method
    from clipwise.methods import adaptive as adaptive
    from clipwise.methods import automatic as automatic
    from clipwise.methods import bam as bam
    from clipwise.methods import batch_clipping as batch_clipping
    from clipwise.methods import dice as dice
    from clipwise.methods import disk as disk
    from clipwise.methods import dp_sat as dp_sat
    from clipwise.methods import flat as flat
    from clipwise.methods import global_ as global_
    from clipwise.methods import inner_momentum as inner_momentum
    from clipwise.methods import layerwise as layerwise
    from clipwise.methods import momentum_per_sample as momentum_per_sample
    from clipwise.methods import normalised as normalised
    from clipwise.methods import p_average as p_average
    from clipwise.methods import psac as psac
    from clipwise.methods import schedule as schedule
    from clipwise.methods import self_augmentation as self_augmentation
    from clipwise.private import Private as Private
    from clipwise.randomness import SecureStream as SecureStream
    from clipwise.randomness import SeededStream as SeededStream
    from clipwise.records import SampleGradients as SampleGradients
    from clipwise.records import oracle as oracle
    from clipwise.records import per_sample as per_sample
    from clipwise.start import make_private as make_private
    from clipwise.training import Run as Run
    from clipwise.training import train as train
    from clipwise.types import InputError as InputError
    from clipwise.types import Refused as Refused

# module → what it holds of these names
_HOME = {
    "accounting": "Ledger calibrate epsilon",
    "diagnostics": "Monitor clipping_bias measure",
    "losses": "cross_entropy squared_error",
    "methods": "METHODS Method adaptive automatic bam batch_clipping dice disk dp_sat flat global_ inner_momentum "
    "layerwise momentum_per_sample normalised p_average psac schedule self_augmentation",
    "private": "Private",
    "randomness": "SecureStream SeededStream",
    "records": "SampleGradients per_sample",
    "start": "make_private",
    "training": "Run train",
    "types": "InputError Refused",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}
# whole modules of which more is used than these names
_MODULES = {
    **{name: name for name in "accounting audit data diagnostics methods models postprocess".split()},
    "oracle": "records.oracle",
}
__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"clipwise.{_MODULES[name]}")
    if name not in _WHERE:
        raise lacking("module 'clipwise'", name, NAMES)
    value = getattr(importlib.import_module(f"clipwise.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
