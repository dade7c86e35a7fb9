"""Fine-tune a pretrained language model on sentences with labels, privately.

Receives: a folder with a model and its tokenizer as Hugging Face saves them, and GLUE's train.tsv and dev.tsv (or any
two tables with the columns ``sentence`` and ``label``). The model must have seen public text only.
Gives: the accuracy on dev.tsv, and what ε it cost.

    python examples/fine_tune.py MODEL_FOLDER train.tsv dev.tsv --epsilon 3 --device cuda
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import clipwise as cw


class Classifier(nn.Module):
    """A linear layer on the mean of the last hidden states."""

    def __init__(self, folder: str, classes: int = 2) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(folder).float()  # also where it was saved in half precision
        self.head = nn.Linear(self.body.config.hidden_size, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits, [sentence, class]."""
        hidden = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def table(path: str, tokenizer, tokens: int) -> dict[str, Tensor]:
    """Sentences cut or filled up to one length, which was fixed beforehand: their longest would be a statistic."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    texts = [row["sentence"] for row in rows]
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
    labels = torch.tensor([int(row["label"]) for row in rows])
    return {"ids": found["input_ids"], "mask": found["attention_mask"], "label": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One value per sample."""
    return nn.functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["label"], reduction="none")


def main() -> None:
    """Read the arguments, train, and print what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of a pretrained model")
    parser.add_argument("train")
    parser.add_argument("dev")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--method", default="automatic()", help="any of clipwise's, such as flat(1.0) or psac()")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--tokens", type=int, default=48, help="of each sentence")
    parser.add_argument("--seed", type=int, default=0, help="of the head's first weights; noise is secure")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    train, dev = (table(path, tokenizer, options.tokens) for path in (options.train, options.dev))
    model = Classifier(options.model)
    for name, parameter in model.body.named_parameters():  # half of the weights, and noise for each; and unused ones
        parameter.requires_grad_("embeddings" not in name and "pooler" not in name)
    model.to(options.device).eval()  # without dropout: the noise regularises enough

    def accuracy(model: nn.Module) -> dict[str, float]:
        right = 0
        with torch.no_grad():
            for start in range(0, len(dev["label"]), 256):
                part = {name: column[start : start + 256].to(options.device) for name, column in dev.items()}
                right += int((model(part["ids"], part["mask"]).argmax(1) == part["label"]).sum())
        return {"accuracy": right / len(dev["label"])}

    run = cw.train(
        model,
        loss,
        train,
        method=options.method,
        epsilon=options.epsilon,
        delta=options.delta,
        epochs=options.epochs,
        batch=options.batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0),
        evaluate=accuracy,
    )
    print(run.report)


if __name__ == "__main__":
    main()
