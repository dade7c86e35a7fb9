"""Pitfalls that make a private run's ε false: those that no other test is named after, and the page that lists all.

Receives: docs/pitfalls.md, and small runs into which somebody falls.
Gives: that each is refused or handled, and that every test that the page names exists.
"""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import clipwise as cw
from clipwise.records import oracle
from clipwise.records.checks import check_samples
from clipwise.step import private_sum
from clipwise.types import Gradient, InputError, Refused

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pitfalls.md"
SEVERITIES = {"broken", "understated", "useless"}
X, Y = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3


def private_for(model: nn.Module, data: Any = (X, Y), **options: Any) -> cw.Private:
    settings = {"noise_multiplier": 1.0, "steps": 1, "batch": 10, "delta": 1e-3, "noise": 1, **options}
    return cw.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def one_by_one(model: nn.Module, batch: Any, bound: float) -> Tensor:
    """Σ_i min(1, C/‖g_i‖) g_i from gradients that autograd gives for each sample alone."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for row in range(len(batch[0])):
        model.zero_grad()
        cw.cross_entropy(model, tuple(t[row : row + 1] for t in batch)).sum().backward()
        gradient = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        total += gradient * min(1.0, bound / float(gradient.norm()))
    model.zero_grad()
    return total


def clipped_sum(model: nn.Module, batch: Any, bound: float) -> Gradient:
    """The same through the library."""
    method, parameters = cw.flat(bound), dict(model.named_parameters())
    (part,) = private_sum(method, parameters, [cw.per_sample(model, cw.cross_entropy, batch)])[0].parts
    return part.value


# Sampling


def test_the_sampling_rate_is_batch_over_samples_and_not_one_over_the_number_of_batches() -> None:
    """A loader of 50 samples in batches of 15 has four batches, or three where the last is dropped."""
    private = private_for(linear(), batch=15)
    assert private.sampling_rate == 15 / 50
    for batch in private.batches():
        private.step(batch)
    ((event, count),) = private.ledger.entries
    assert (event.sampling_rate, count) == (0.3, 1)  # type: ignore[union-attr]


def test_no_batch_is_dropped_neither_a_last_short_one_nor_an_empty_one() -> None:
    """Every planned step is released: what a chunk does not fill, and what holds nobody, too."""
    private = private_for(linear(), batch=2, steps=40, chunk=3)
    sizes = []
    for batch in private.batches():
        private.step(batch)
        assert private.observed is not None and private.observed.samples == len(batch)
        sizes.append(len(batch))
    assert private.ledger.releases == len(sizes) == 40
    assert 0 in sizes and any(size > 3 and size % 3 for size in sizes), "this seed draws such batches"


# Losses and models


def test_a_loss_averaged_over_the_batch_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(InputError, match=r"one value per sample.*reduction"):
        private_for(linear(), loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))


class Remembering(nn.Module):
    """A running mean of the inputs: in a buffer, or where the optimizer does not hold it, or gives it its own noise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, mean = linear(), torch.zeros(4)
        self.mean = nn.Buffer(mean) if kind == "buffer" else nn.Parameter(mean, requires_grad=kind == "trained")

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.linear(x + 0 * self.mean) if self.mean.requires_grad else self.linear(x)


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained"])
def test_a_buffer_or_a_parameter_that_the_forward_pass_writes_the_batch_into_is_refused(kind: str) -> None:
    model = Remembering(kind)
    said = f"{'buffer' if kind == 'buffer' else 'parameter'} mean is computed from the batch"
    with pytest.raises(Refused, match=said):
        check_samples(model, cw.cross_entropy, (X[:4], Y[:4]))
    assert not model.mean.any()  # left as it was
    with pytest.raises(Refused, match=said):
        private_for(model)


def test_samples_that_mix_are_found_also_where_the_first_rows_are_all_alike() -> None:
    """Of equal rows, changing one into another changes nothing: the self-test takes rows that are far apart."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, 6), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            inside = self.embedding(tokens).mean(1)
            return self.linear(inside - inside.detach().mean(0, keepdim=True))

    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (50, 5))
    tokens[:8] = 1
    with pytest.raises(Refused, match="mixes the samples"):
        private_for(Mixing(), (tokens, 0 * Y))


def test_grouped_convolutions_are_clipped_by_the_norm_of_each_samples_own_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 9, 3)).double()
    batch = (torch.randn(5, 4, 5, 5, dtype=torch.float64), torch.arange(5) % 3)
    found = torch.cat([v.flatten() for v in clipped_sum(model, batch, 0.3).values()])
    assert torch.allclose(found, one_by_one(model, batch, 0.3), rtol=1e-4, atol=1e-9)


class Tied(nn.Module):
    """One weight used twice, so that both of its gradients point the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + nn.functional.linear(x, self.weight)


def test_a_tied_weight_is_bounded_by_the_sum_of_its_gradients_and_not_by_each() -> None:
    """Bounded each by itself, two that point the same way would add up to twice the bound."""
    model, bound = Tied(), 1e-3
    (value,) = clipped_sum(model, (X[:1].double(), Y[:1]), bound).values()
    assert float(value.norm()) == pytest.approx(bound, rel=1e-4) and float(value.norm()) <= bound
    found = cw.per_sample(model, cw.cross_entropy, (X[:4].double(), Y[:4])).norms()
    assert torch.allclose(found, oracle.per_sample(model, cw.cross_entropy, (X[:4].double(), Y[:4])).norms())


# Sensitivity


def test_microbatches_of_several_samples_are_counted_with_twice_the_bound() -> None:
    """A sample can turn the average of its microbatch around: from +C to −C."""
    method = cw.p_average(cw.flat(0.5), size=5)
    model = linear()
    assert method.sensitivity(["weight", "bias"]) == 2 * 0.5
    private = private_for(model, method=method, batch=50, steps=300, noise_multiplier=0.7)
    releases = []
    for batch in private.batches():
        private.step(batch)
        assert private.state.released is not None
        for parameter in model.parameters():  # it stays where it began
            parameter.data.zero_()
        releases.append(torch.cat([v.flatten() for v in private.state.released.values()]))
    noise = torch.stack(releases[1:]).std(0).mean() * 50 / 5  # of the sum: the number of microbatches is public
    assert float(noise) == pytest.approx(0.7 * 2 * 0.5, rel=0.1)


def test_a_data_set_that_holds_a_sample_twice_is_refused_through_subsets_and_concatenations() -> None:
    data = TensorDataset(X, Y)
    apart = ConcatDataset([Subset(data, [0, 2, 4]), Subset(data, [1, 3]), TensorDataset(X[:3] + 1, Y[:3])])
    private_for(linear(), apart, batch=2)
    for twice in (
        ConcatDataset([data, data]),
        ConcatDataset([Subset(data, [0, 3]), Subset(data, [3, 1])]),
        Subset(ConcatDataset([data, data]), [3, 53]),
    ):
        with pytest.raises(Refused, match="repeated.*twice the sensitivity"):
            private_for(linear(), twice, batch=2)


class Read(Dataset[Any]):
    """Pictures, read anew for each transform, as torchvision's data sets are."""

    def __init__(self, root: str, transform: Callable[[Tensor], Tensor], rows: Any = X) -> None:
        self.root, self.transform = root, transform
        self.data, self.targets = [row.clone() for row in rows], Y[: len(rows)].tolist()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.data[index]), self.targets[index]


def test_a_data_set_that_is_made_again_for_another_transform_holds_each_sample_twice() -> None:
    """As augmentation it is common: MNIST(root, transform=a) + MNIST(root, transform=b)."""
    plain, turned = Read("here", torch.clone), Read("here", torch.neg)
    for twice in (plain + turned, Subset(plain, [0, 2]) + Subset(turned, [2, 3])):
        with pytest.raises(Refused, match="repeated.*twice the sensitivity.*one of several transforms"):
            private_for(linear(), twice, batch=2)
    for apart in (
        Subset(plain, [0, 2]) + Subset(turned, [1, 3]),
        plain + Read("here", torch.neg, X + 1),
        plain + Read("there", torch.neg),
        plain + Read("here", torch.neg, X[1:]),
    ):
        private_for(linear(), apart, batch=2)


# Noise


def test_a_model_wrapped_for_several_devices_is_refused() -> None:
    with pytest.raises(Refused, match=r"DataParallel.*write model\.module"):
        private_for(nn.DataParallel(linear()))


def test_a_model_in_bfloat16_gets_noise_that_is_drawn_and_added_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(torch.bfloat16)
    private = private_for(model, (X.to(torch.bfloat16), Y), self_test=False)
    for batch in private.batches():
        private.step(batch)
    assert private.state.released is not None
    for value in private.state.released.values():  # rounded once, to float32: in bfloat16 the noise would be rounded
        assert value.dtype == torch.float32 and not torch.equal(value, value.bfloat16().float())


def test_class_weights_are_divided_out_by_normalising_methods_and_kept_by_flat_above_the_norms() -> None:
    model, rare = linear(), Y == 1

    def of_the_rare(method: cw.Method, weight: float) -> Tensor:
        """How long the rare class's part of the clipped sum is, to that of the others."""

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return cw.cross_entropy(model, batch) * torch.where(batch[1] == 1, weight, 1.0)

        parts = []
        for those in (rare, ~rare):
            gradients = cw.per_sample(model, loss, (X[those], Y[those]))
            total = gradients.weighted_sum(method.weigh(gradients.norms()))
            parts.append(torch.cat([value.flatten() for value in total.values()]).norm())
        return parts[0] / parts[1]

    for method in (cw.normalised(), cw.automatic(), cw.psac(), cw.flat(0.01)):
        assert of_the_rare(method, 10.0) < 1.1 * of_the_rare(method, 1.0)
    torch.testing.assert_close(of_the_rare(cw.flat(100.0), 10.0), 10 * of_the_rare(cw.flat(100.0), 1.0))


# The page


def named() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Of each row of the page's table: the pitfall, its severity, and its tests as (file, function)."""
    rows = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[1] in SEVERITIES:
            rows.append((cells[0], cells[1], re.findall(r"`(test_\w+\.py)::(test_\w+)`", cells[3])))
    return rows


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_of_pitfalls_names_exists() -> None:
    rows = named()
    assert len(rows) >= 18 and all(tests for _, _, tests in rows)
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 2, "a row's severity is none of the three, or a cell holds a bar"
    missing = [f"{file}::{name}" for _, _, tests in rows for file, name in tests if name not in functions(file)]
    assert missing == []


def test_every_pitfall_tested_here_is_on_the_page() -> None:
    on_page = {name for _, _, tests in named() for file, name in tests if file == Path(__file__).name}
    about_the_page = {name for name in functions(Path(__file__).name) if "page" in name}
    here = {name for name in functions(Path(__file__).name) if name.startswith("test_")}
    assert here - about_the_page == on_page
