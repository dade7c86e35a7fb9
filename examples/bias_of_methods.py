"""What would each method do to these gradients? The clipping bias of several methods on one batch, side by side.

Receives: nothing; it trains a small network on scikit-learn's digits for a moment, without privacy.
Gives: a table. It reads raw gradients: not private, for the data's owner only.
"""

import torch

import clipwise as cw
from clipwise.data import load
from clipwise.models import build

torch.manual_seed(0)
data = load("digits")
model = build("digits_cnn", data.shape, data.classes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(20):
    optimizer.zero_grad()
    cw.cross_entropy(model, data.train.data).mean().backward()
    optimizer.step()
optimizer.zero_grad()

gradients = cw.per_sample(model, cw.cross_entropy, data.test.data)
norms = gradients.norms()
print(f"{gradients.samples} samples, norms {norms.min():.2f} to {norms.max():.2f}, median {norms.median():.2f}\n")
print(f"{'method':52} {'off the true direction':>22} {'shortened':>10}")
for method in (
    cw.flat(1.0),
    cw.flat(5.0),
    cw.normalised(),
    cw.automatic(),
    cw.psac(),
    cw.global_(10.0),
    cw.layerwise(),
):
    bias = cw.clipping_bias(gradients, method)
    print(f"{method!s:52} {bias.direction_error:>22.1%} {bias.clipped:>10.0%}")
