"""Hugging Face models with random weights: exact norms against one sample at a time, and no fallback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import flat, one_by_one
from clipwise.records import Capture, SampleGradients, from_dense, per_sample
from clipwise.records.checks import check_samples
from clipwise.types import Gradient

transformers = pytest.importorskip("transformers")

SAMPLES, STEPS, WORDS, WIDTH = 4, 6, 19, 16
Batch = dict[str, Tensor]


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample's mean loss over its real words."""
    mask = batch["attention_mask"]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)


def label(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def translation(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)


def words() -> Batch:
    lengths = torch.tensor([6, 3, 5, 6])
    return {
        "input_ids": torch.randint(2, WORDS, (SAMPLES, STEPS)),
        "attention_mask": (torch.arange(STEPS) < lengths[:, None]).long(),
    }


def labelled(batch: Batch) -> Batch:
    return {**batch, "labels": torch.randint(0, 3, (SAMPLES,))}


def pairs() -> Batch:
    return {**words(), "labels": torch.randint(1, WORDS, (SAMPLES, 4))}


def gpt2() -> nn.Module:
    size = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


SIZE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZE, **STILL, vocab_size=WORDS, max_position_embeddings=12)
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZE, **STILL, image_size=8, patch_size=4, num_channels=2)
    return transformers.ViTForImageClassification(config)


def llama() -> nn.Module:
    """RMSNorm, rotary positions, gated products, and fewer key heads than query heads."""
    size = {**SIZE, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**size, num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=12)
    return transformers.LlamaForCausalLM(config)


def t5(attention: str) -> nn.Module:
    """A trained bias of relative positions meets the mask in either implementation of attention."""
    size = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS}
    config = transformers.T5Config(**size, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    config._attn_implementation = attention
    return transformers.T5ForConditionalGeneration(config)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    data: Callable[[], Batch]
    loss: Callable[[nn.Module, Any], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double().train()

    def batch(self) -> Batch:
        torch.manual_seed(1)
        batch = self.data()
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


CASES = {
    "GPT-2": Case(gpt2, words, next_word),
    "BERT": Case(bert, lambda: labelled(words()), label),
    "ViT": Case(vit, lambda: labelled({"pixel_values": torch.randn(SAMPLES, 2, 8, 8)}), label),
    "Llama": Case(llama, words, next_word),
    "T5": Case(lambda: t5("sdpa"), pairs, translation),
    "T5 with eager attention": Case(lambda: t5("eager"), pairs, translation),
}
every_model = pytest.mark.parametrize("name", CASES)


@cache
def found(name: str) -> SampleGradients:
    case = CASES[name]
    return per_sample(case.model(), case.loss, case.batch())


@cache
def expected(name: str) -> SampleGradients:
    case = CASES[name]
    model, batch = case.model(), case.batch()
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(SAMPLES)]
    gradients: Gradient = one_by_one(model, case.loss, rows)
    return from_dense(gradients, dict(model.named_parameters()))


@every_model
def test_norms_are_exact_also_for_each_parameter(name: str) -> None:
    ours, theirs = found(name), expected(name)
    assert torch.allclose(ours.norms(), theirs.norms(), rtol=1e-9)
    each = [[parameter] for parameter in theirs.names]
    whole = theirs.norms().square().max()
    assert (ours.norms(each).square() - theirs.norms(each).square()).abs().max() <= 1e-9 * whole


@every_model
def test_sums_and_written_out_gradients_are_exact(name: str) -> None:
    ours, theirs = found(name), expected(name)
    weights = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
    size = theirs.norms().max()
    for first, second in (
        (ours.weighted_sum(weights), theirs.weighted_sum(weights)),
        (ours.materialise(), theirs.materialise()),
    ):
        assert (flat(first) - flat(second)).abs().max() <= 1e-10 * size


@every_model
def test_units_and_sums_of_gradients_have_exact_norms(name: str) -> None:
    ours, theirs = found(name), expected(name)
    assert torch.allclose(ours.merged(2).norms(), theirs.merged(2).norms(), rtol=1e-9)
    turned = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    assert torch.allclose((ours + turned * ours).norms(), (theirs + turned * theirs).norms(), rtol=1e-6, atol=1e-6)


@every_model
def test_every_operation_has_a_fast_path_and_every_parameter_is_used(name: str) -> None:
    assert found(name).fallbacks == ()
    assert found(name).unused == ()


@every_model
def test_the_self_test_passes(name: str) -> None:
    case = CASES[name]
    check_samples(case.model(), case.loss, case.batch())


def test_the_tied_tables_are_one_parameter_each() -> None:
    for name, table in (("GPT-2", "transformer.wte.weight"), ("T5", "shared.weight")):
        assert table in found(name).names
        assert not any("lm_head" in parameter or "embed_tokens" in parameter for parameter in found(name).names)


@every_model
def test_other_batches_follow_the_same_plan(name: str) -> None:
    """One capture for a batch of another size, as Poisson sampling draws them."""
    case = CASES[name]
    capture = Capture(case.model(), case.loss)
    capture(case.batch())
    two = {key: value[[1, 3]] for key, value in case.batch().items()}
    assert torch.allclose(capture(two).norms(), expected(name).norms()[[1, 3]], rtol=1e-9)
    assert len(capture.plans) == 1


def test_dropout_in_training_mode_is_followed() -> None:
    """The sum over samples is the ordinary gradient under the same masks."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, num_labels=3, vocab_size=WORDS, max_position_embeddings=12)
    model, batch = transformers.BertForSequenceClassification(config).double().train(), CASES["BERT"].batch()
    torch.manual_seed(3)
    ours = per_sample(model, label, batch).weighted_sum(torch.ones(SAMPLES, dtype=torch.float64))
    torch.manual_seed(3)
    theirs = torch.autograd.grad(label(model, batch).sum(), list(model.parameters()))
    size = torch.cat([g.flatten() for g in theirs]).abs().max()
    assert all((a - b).abs().max() <= 1e-10 * size for a, b in zip(ours.values(), theirs, strict=True))


def test_the_example_fine_tunes_a_saved_model(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = transformers.BertConfig(**SIZE, vocab_size=len(words), max_position_embeddings=8)
    transformers.BertModel(config).half().save_pretrained(tmp_path)
    for name, rows in (("train", 60), ("dev", 10)):
        lines = [f"a {words[5 + i % 2]} film\t{i % 2}" for i in range(rows)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    example = Path(__file__).parent.parent / "examples/fine_tune.py"
    arguments = f"{example} . train.tsv dev.tsv --epsilon 8 --epochs 0.5 --batch 20 --tokens 6"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *arguments.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "measured: step 2, epsilon" in done.stdout and "accuracy" in done.stdout
