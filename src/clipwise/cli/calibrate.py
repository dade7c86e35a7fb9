"""``clipwise calibrate``: from ε to noise and back, without torch.

Receives: CalibrateConfig.
Gives: the noise multiplier, or the ε, as text or JSON.
"""

from __future__ import annotations

import json

from clipwise import accounting
from clipwise.accounting.events import RELATION
from clipwise.config import CalibrateConfig, one_given


def run(config: CalibrateConfig) -> str:
    """What the noise costs, or which noise it takes."""
    one_given(config, "epsilon", "noise_multiplier", "--epsilon 4")
    setting = {
        "delta": config.delta,
        "sampling_rate": config.sampling_rate,
        "steps": config.steps,
        "accountant": config.accountant,
    }
    if config.noise_multiplier is None:
        epsilon = config.epsilon or 0.0
        noise = accounting.calibrate(epsilon=epsilon, **setting)  # type: ignore[arg-type]
        answer = f"noise multiplier {noise:g} keeps ε ≤ {epsilon:g}"
    else:
        noise = config.noise_multiplier
        epsilon = accounting.epsilon(noise_multiplier=noise, **setting)  # type: ignore[arg-type]
        answer = f"ε = {epsilon:.4f} with noise multiplier {noise:g}"
    if config.json:
        return json.dumps({"noise_multiplier": noise, "epsilon": epsilon, **setting, "relation": RELATION}) + "\n"
    return (
        f"{answer} at δ = {config.delta:g}\n"
        f"  {config.steps} Poisson-sampled steps at rate {config.sampling_rate:g}; "
        f"neighbours: {RELATION}; {config.accountant}\n"
    )
