"""The tangent kernel under clipping against written-out Jacobians, and the claims of paper 2's Theorems 1 and 2.

Receives: small networks in float64.
Gives: H, H C and Σ H_r C_r, their symmetry and positivity, the loss's slope, and whether descent is monotone.
"""

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import clipwise as cw
import naive
from clipwise.diagnostics import Tangent, flow, gram, kernel, logit, logit_rows, ntk
from clipwise.methods import Method
from clipwise.records import per_sample
from clipwise.types import Batch, InputError


def output(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(batch[0]).squeeze(1)
    return value


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return (output(model, batch) - batch[1]).square()


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def regression(seed: int = 0, samples: int = 7) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    targets = 3 * torch.randn(samples, dtype=torch.float64) ** 3
    return model, (torch.randn(samples, 3, dtype=torch.float64), targets)


def jacobians(model: nn.Module, inputs: Tensor) -> dict[str, np.ndarray]:
    """∂f/∂w_r, one row for each output of each sample. [row, parameters of layer r]."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = jacrev(lambda own: functional_call(model, own, (inputs,)).flatten())(parameters)
    layers: dict[str, list[np.ndarray]] = {}
    for name, value in found.items():
        layers.setdefault(name.partition(".")[0], []).append(value.flatten(1).numpy())
    return {layer: np.concatenate(parts, 1) for layer, parts in layers.items()}


def analysed(model: nn.Module, batch: Batch, method: Method) -> Tangent:
    return ntk(per_sample(model, output, batch), per_sample(model, squared, batch), method)


def test_h_and_hc_are_their_definitions() -> None:
    model, batch = regression()
    jacobian = np.concatenate(list(jacobians(model, batch[0]).values()), 1)
    residual = 2 * (output(model, batch) - batch[1]).detach().numpy()  # ∂ℓ/∂f
    norms = np.linalg.norm(residual[:, None] * jacobian, axis=1)
    radius = float(np.median(norms))
    for method, weight in [
        (cw.flat(radius), naive.flat_weight),
        (cw.global_(radius * 1.01), lambda n, c: naive.global_weight(n, c)),
        (cw.normalised(radius), naive.normalised_weight),
    ]:
        c = np.diag([weight(n, method.bound) for n in norms])
        h = jacobian @ jacobian.T
        found = analysed(model, batch, method)
        assert found.plain.matrix.numpy() == pytest.approx(h)
        assert found.clipped.matrix.numpy() == pytest.approx(h @ c)
        expected = np.sort(np.linalg.eigvals(h @ c).real)
        assert [value.real for value in found.clipped.eigenvalues] == pytest.approx(expected, abs=1e-9)
        forms = np.linalg.eigvalsh((h @ c + c @ h) / 2)
        assert found.clipped.least_form == pytest.approx(forms[0])
        asymmetry = np.linalg.norm(h @ c - c @ h) / np.linalg.norm(h @ c)
        assert found.clipped.asymmetry == pytest.approx(asymmetry)
        # dL/dt = −(∂L/∂f) H C (∂L/∂f)ᵀ (4.3)
        slope = -(residual / len(norms)) @ h @ c @ (residual / len(norms))
        assert found.slope == pytest.approx(slope)


def test_layerwise_clipping_s_kernel_is_the_sum_of_h_r_c_r() -> None:
    model, batch = regression(1)
    parts = jacobians(model, batch[0])
    residual = 2 * (output(model, batch) - batch[1]).detach().numpy()
    bounds = {"0": 0.5, "2": 3.0}
    total = np.zeros((7, 7))
    for layer, jacobian in parts.items():
        norms = np.linalg.norm(residual[:, None] * jacobian, axis=1)
        total += jacobian @ jacobian.T @ np.diag([naive.flat_weight(n, bounds[layer]) for n in norms])
    found = analysed(model, batch, cw.layerwise({layer: cw.flat(c) for layer, c in bounds.items()}))
    assert found.clipped.matrix.numpy() == pytest.approx(total)
    assert found.slope == pytest.approx(-(residual / 7) @ total @ (residual / 7))  # (4.4)


def test_a_classifier_s_kernel_has_a_row_for_each_logit() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,)))
    losses = per_sample(model, cross_entropy, batch)
    method = cw.flat(float(losses.norms().median()))
    found = ntk(per_sample(model, logit, logit_rows(batch[0], 3)), losses, method)
    jacobian = np.concatenate(list(jacobians(model, batch[0]).values()), 1)
    assert found.plain.matrix.numpy() == pytest.approx(jacobian @ jacobian.T)
    c = np.repeat([naive.flat_weight(n, method.bound) for n in losses.norms().tolist()], 3)
    assert found.clipped.matrix.numpy() == pytest.approx(jacobian @ jacobian.T @ np.diag(c))
    logits = model(batch[0]).detach()
    slopes = (logits.softmax(1) - nn.functional.one_hot(batch[1], 3)).flatten().numpy() / 6  # ∂L/∂f
    assert found.slope == pytest.approx(-slopes @ found.clipped.matrix.numpy() @ slopes)


def test_a_gram_matrix_is_that_of_written_out_gradients_in_every_group() -> None:
    model, batch = regression(3)
    losses = per_sample(model, squared, batch)
    dense = {name: value.flatten(1) for name, value in losses.materialise().items()}
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    found = gram(losses, groups)
    for part, names in zip(found, groups, strict=True):
        rows = torch.cat([dense[name] for name in names], 1)
        torch.testing.assert_close(part, rows @ rows.T)
        assert torch.equal(part, part.T)
    torch.testing.assert_close(gram(losses)[0], found.sum(0))


# Theorem 2: where no norm exceeds R, clipping changes nothing


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["flat", "global_", "layerwise"])
def test_where_every_norm_is_within_the_bound_the_kernel_is_h_itself(seed: int, name: str) -> None:
    model, batch = regression(seed)
    most = float(per_sample(model, squared, batch).norms().max()) * (1 + 1e-12)  # the last digits may differ elsewhere
    wide = {"flat": cw.flat(most), "global_": cw.global_(most)}
    # each layer gets its share of the bound, C/√L
    method = wide[name] if name in wide else cw.layerwise(cw.flat(most * 2))
    found = analysed(model, batch, method)
    assert torch.equal(found.clipped.matrix, found.plain.matrix)
    assert found.clipped.symmetric and found.clipped.positive_in_form and found.clipped.positive_in_eigenvalues
    assert found.slope < 0


def test_global_clipping_that_drops_a_sample_is_no_longer_symmetric() -> None:
    model, batch = regression(0)
    norms = per_sample(model, squared, batch).norms().sort().values
    found = analysed(model, batch, cw.global_(float(norms[-2])))
    assert not found.clipped.symmetric and found.clipped.positive_in_eigenvalues


def test_without_clipping_the_loss_falls_monotonically() -> None:
    for method in (cw.flat(1e6), cw.global_(1e6), cw.layerwise(cw.flat(1e6))):
        model, batch = opposed()
        path = flow(model, halved, batch, method, rate=0.5, steps=250)
        assert not path.rises and max(path.slopes) < 0
        assert path.losses[-1] < 1e-2 * path.losses[0]


# Theorem 1: a small bound breaks symmetry, and may break positivity and the loss's fall


def opposed() -> tuple[nn.Module, Batch]:
    """One sample far off and three a little off on the other side: clipped, the three outvote the one.

    H = 1 1ᵀ + ¼ I is positive definite.
    """
    model = nn.Linear(5, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs = torch.cat([torch.ones(4, 1), 0.5 * torch.eye(4)], 1).double()
    return model, (inputs, torch.tensor([-10.0, 2.0, 2.0, 2.0], dtype=torch.float64))


def halved(model: nn.Module, batch: Batch) -> Tensor:
    return squared(model, batch) / 2


def test_flat_clipping_breaks_symmetry_and_quadratic_positivity_but_no_eigenvalue() -> None:
    model, batch = opposed()
    found = ntk(per_sample(model, output, batch), per_sample(model, halved, batch), cw.flat(1.0))
    assert found.plain.symmetric and found.plain.positive_in_form
    assert not found.clipped.symmetric and not found.clipped.positive_in_form
    assert found.clipped.positive_in_eigenvalues
    assert all(abs(value.imag) < 1e-9 for value in found.clipped.eigenvalues)
    assert found.slope > 0  # along this batch's own residuals, not only along some x
    assert "RISES" in found.text() and "not positive in quadratic form" in found.text()


@pytest.mark.parametrize("seed", range(5))
def test_flat_clipping_is_positive_in_eigenvalues_on_any_network(seed: int) -> None:
    model, batch = regression(seed)
    found = analysed(model, batch, cw.flat(0.1))
    assert found.clipped.positive_in_eigenvalues and not found.clipped.symmetric


def test_layerwise_clipping_may_be_negative_in_eigenvalues() -> None:
    class Two(nn.Module):
        """f = w_1 φ_1 + w_2 φ_2 with one weight in each layer: H_r = φ_r φ_rᵀ."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Linear(1, 1, bias=False) for _ in range(2))
            nn.init.zeros_(self.one.weight)
            nn.init.zeros_(self.two.weight)

        def forward(self, inputs: Tensor) -> Tensor:
            left: Tensor = self.one(inputs[:, :1])
            return left + self.two(inputs[:, 1:])

    model = Two().double()
    # φ_1 = (1, 2), φ_2 = (1, 1); ∂ℓ/∂f = (−1, −10), so C_1 = (1, 1/20) at bound 1 and C_2 = 1 at bound 10
    batch = (torch.tensor([[1.0, 1.0], [2.0, 1.0]]).double(), torch.tensor([1.0, 10.0]).double())
    method = cw.layerwise({"one": cw.flat(1.0), "two": cw.flat(10.0)})
    found = ntk(per_sample(model, output, batch), per_sample(model, halved, batch), method)
    assert found.plain.positive_in_eigenvalues
    assert not found.clipped.positive_in_eigenvalues
    expected = np.array([[1, 0.1], [2, 0.2]]) + np.ones((2, 2))
    assert found.clipped.matrix.numpy() == pytest.approx(expected)
    assert found.clipped.eigenvalues[0].real == pytest.approx(np.linalg.eigvals(expected).real.min())


def test_under_flat_clipping_the_loss_may_rise_before_it_falls_to_zero() -> None:
    model, batch = opposed()
    path = flow(model, halved, batch, cw.flat(1.0), rate=0.5, steps=400)
    assert 0 in path.rises and path.slopes[0] > 0
    assert path.losses[-1] < 1e-2 * path.losses[0]  # Theorem 1.4: where it converges, to zero
    assert path.not_private


def test_a_flow_s_first_slope_is_the_kernel_s_and_the_losses_follow_it() -> None:
    model, batch = regression(4)
    method = cw.psac(0.3)
    found = analysed(model, batch, method)
    path = flow(model, squared, batch, method, rate=1e-5, steps=1)
    assert path.slopes[0] == pytest.approx(found.slope)
    assert (path.losses[1] - path.losses[0]) / 1e-5 == pytest.approx(found.slope, rel=1e-3)


def test_a_flow_moves_a_copy_and_not_the_model() -> None:
    model, batch = opposed()
    flow(model, halved, batch, cw.flat(1.0), rate=0.1, steps=3)
    assert not model.weight.any() and model.weight.grad is None


# Definition 4.3, on the matrices themselves


def test_positivity_in_quadratic_form_and_in_eigenvalues_are_different_things() -> None:
    matrix = torch.tensor([[1.0, 10.0], [0.0, 1.0]], dtype=torch.float64)
    found = kernel(matrix)
    assert found.positive_in_eigenvalues and not found.positive_in_form and not found.symmetric
    x = torch.tensor([1.0, -1.0], dtype=torch.float64) / 2**0.5
    assert found.least_form == pytest.approx(float(x @ matrix @ x))  # the least there is
    turned = kernel(torch.tensor([[1.0, 2.0], [-2.0, 1.0]], dtype=torch.float64))
    assert turned.positive_in_form and sorted(v.imag for v in turned.eigenvalues) == pytest.approx([-2.0, 2.0])


def test_float32_networks_are_judged_within_their_rounding() -> None:
    model, batch = regression()
    model, batch = model.float(), tuple(part.float() for part in batch)
    found = analysed(model, batch, cw.flat(1e6))
    assert found.plain.symmetric and found.plain.positive_in_form and found.clipped.positive_in_form


def test_an_analysis_says_that_it_is_not_private() -> None:
    model, batch = regression()
    found = analysed(model, batch, cw.flat())
    assert json.loads(json.dumps(found.as_dict()))["not_private"] is True and "not private" in found.text()


def test_methods_that_are_more_than_weights_are_an_error() -> None:
    model, batch = regression()
    for name in ("bam", "dice", "p_average"):
        with pytest.raises(InputError, match="a weight function such as flat"):
            analysed(model, batch, cw.METHODS[name]())


def test_outputs_of_other_samples_are_an_error() -> None:
    model, batch = regression()
    fewer = tuple(part[:5] for part in batch)
    with pytest.raises(InputError, match="the outputs of the same samples"):
        ntk(per_sample(model, output, batch), per_sample(model, squared, fewer), cw.flat())


def test_a_method_may_be_named_by_its_expression_as_in_measure() -> None:
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    outputs, losses = (
        cw.per_sample(model, logit, logit_rows(batch[0], classes=2)),
        cw.per_sample(model, cw.cross_entropy, batch),
    )
    assert ntk(outputs, losses, "flat(0.5)").text() == ntk(outputs, losses, cw.flat(0.5)).text()
    assert flow(model, cw.cross_entropy, batch, "flat(0.5)", rate=0.1, steps=2) == flow(
        model, cw.cross_entropy, batch, cw.flat(0.5), rate=0.1, steps=2
    )
    with pytest.raises(InputError, match="expected a method or its expression, got 0.5"):
        ntk(outputs, losses, 0.5)  # type: ignore[arg-type]
