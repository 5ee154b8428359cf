"""Scores of other methods for the training of `tests.bench.language_validation`, compared with the same retrainings.

    gradients, products   ∇ℓ(q)·∇ℓ(i) at the end of training
    gradients, cosine     products of normalized gradients
    BM25                  Okapi's, k₁ = 1.5 and b = 0.75, of sequences of three bytes
    EKFAC, kronfluence    influence functions by its Fisher factors of linear layers, with its default damping of a
                          tenth of the mean eigenvalue
    TRAK, dattri, traker  of this one training, projected to 128 numbers

A score is the increase of a query's loss, so helpful examples have negative scores.

PYTHONPATH=.venv/others python -m tests.bench.language_scores FOLDER TEXT [TEXT …]     FOLDER has a finished validation
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import TensorDataset

from ntkexp.shapes import Weights
from tests.bench import scorers
from tests.bench.attribution_asked import AbstractAsked
from tests.bench.language_validation import compare, language_model, losses, recorded, texts

DIMENSION = 128  # of TRAK's projection
GRAM, K1, B = 3, 1.5, 0.75  # of BM25
Score: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function of a trained model, its texts and the queries. It returns scores [query, text]."""


class Logits(nn.Module):
    """The model as a function of tokens, with plain linear layers, which other libraries need."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for name, layer in list(inner.named_modules()):
            if type(layer).__name__ == "Conv1D":
                weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
                plain = nn.Linear(len(weight), len(bias)).to(weight)
                plain.weight.data, plain.bias.data = weight.detach().T.contiguous(), bias.detach()
                parent, _, own_name = name.rpartition(".")
                setattr(inner.get_submodule(parent), own_name, plain)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return found


def loss_of_one(model: nn.Module) -> Callable[[Weights, Tensor], Tensor]:
    return lambda weights, tokens: losses(functional_call(model, weights, (tokens[None],)), tokens[None])[0]


def gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return ∇ℓ of each text, [text, weight]."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    found = vmap(grad(loss_of_one(model)), (None, 0), chunk_size=25)(weights, tokens)
    return torch.cat([part.flatten(1) for part in found.values()], 1)


def products(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    return -gradients(model, asked) @ gradients(model, seen).T


def cosine(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    left, right = (functional.normalize(gradients(model, each)) for each in (asked, seen))
    return -left @ right.T


def bm25(_: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    """Return minus Okapi's BM25, which needs no model: Σ_g log(1 + (N − N_g + ½)/(N_g + ½)) n_g (k₁ + 1)/(n_g + k)
    over the sequences g of the query, for k = k₁ (1 − b + b L/L̄).

    N_g of N texts contain g. The text has L sequences, n_g of them g; L̄ is the mean of L over texts.
    """
    texts, queries = ([grams(row) for row in each.tolist()] for each in (seen, asked))
    texts_with = Counter(gram for text in texts for gram in text)
    rarity = {gram: math.log(1 + (len(texts) - count + 0.5) / (count + 0.5)) for gram, count in texts_with.items()}
    mean_length = sum(text.total() for text in texts) / len(texts)
    found = torch.zeros(len(queries), len(texts), dtype=torch.float64)
    for q, query in enumerate(queries):
        for t, text in enumerate(texts):
            k = K1 * (1 - B + B * text.total() / mean_length)
            found[q, t] = -sum(rarity[g] * text[g] * (K1 + 1) / (text[g] + k) for g in query if g in text)
    return found


def grams(row: list[int]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row[start : start + GRAM]) for start in range(len(row) - GRAM + 1))


def ekfac(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    """Return the scores of kronfluence, for the linear layers and the readout."""
    from kronfluence.analyzer import Analyzer, prepare_model  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from kronfluence.task import Task  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    class Language(Task):  # type: ignore[misc, unused-ignore]
        def compute_train_loss(self, batch: list[Tensor], model: nn.Module, sample: bool = False) -> Tensor:
            logits, labels = model(batch[0])[:, :-1], batch[0][:, 1:]
            if sample:
                with torch.no_grad():
                    labels = torch.multinomial(logits.flatten(0, 1).softmax(1), 1).view_as(labels)
            return functional.cross_entropy(logits.mT, labels, reduction="none").mean(1).sum()

        def compute_measurement(self, batch: list[Tensor], model: nn.Module) -> Tensor:
            return losses(model(batch[0]), batch[0]).sum()

    task, train, read = Language(), TensorDataset(seen), TensorDataset(asked)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("gpt2", prepare_model(model, task), task, cpu=True, disable_tqdm=True, output_dir=folder)
        analyzer.fit_all_factors("factors", train, per_device_batch_size=50)
        analyzer.compute_pairwise_scores("scores", "factors", read, train, per_device_query_batch_size=50)
        found: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -found.double()


class OfText(AbstractAsked):
    """The loss ℓ of a text. Its margin is log p/(1 − p), with p = exp(−ℓ)."""

    margin_raises: ClassVar[float] = -1.0

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return losses(outputs, targets)

    def targets(self, targets: Tensor) -> Tensor:
        return targets

    def margin(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.of(outputs, targets)
        return -loss - torch.log(-torch.expm1(-loss))

    def pull(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -torch.expm1(-self.of(outputs, targets))


def asked_of_trak(model: nn.Module, seen: Tensor, asked: Tensor) -> dict[str, Any]:
    """Return the question for TRAK. A text is its own target."""
    texts = {"inputs": seen, "targets": seen, "read": asked, "read_targets": asked}
    return {"network": model, "ends": [model.state_dict()], "asked": OfText(), "dimension": DIMENSION, **texts}


def trak_of_dattri(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    case = asked_of_trak(model, seen, asked)
    return -scorers.trak(case, scorers.loaders_of(case)).T.double()


def trak_of_traker(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    return -scorers.traker(asked_of_trak(model, seen, asked))


SCORES: dict[str, Score] = {
    "gradients-products": products,
    "gradients-cosine": cosine,
    "bm25": bm25,
    "ekfac-kronfluence": ekfac,
    "trak-dattri": trak_of_dattri,
    "trak-traker": trak_of_traker,
}


def main(folder: Path, files: list[str]) -> None:
    (seen, asked), model = texts(files), language_model()
    model.load_state_dict(recorded(folder).steps.end, strict=False)  # the readout is the table of words
    given = dict[str, Tensor]()
    for name, score in SCORES.items():
        began = time.process_time()
        given[name] = score(Logits(deepcopy(model).eval()), seen, asked)
        sys.stdout.write(f"{name}: {time.process_time() - began:.1f} s of CPU\n")
    compare(folder, files, given)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
