"""Scores of other methods for the training of `tests.bench.language_validation`, held against the same retrainings.

    gradients, products   ∇ℓ(q)·∇ℓ(i) at the end of training
    gradients, cosine     the same, of gradients of length one
    BM25                  Okapi's, k₁ = 1.5 and b = 0.75, of sequences of three bytes
    EKFAC, kronfluence    influence functions by its Fisher factors of linear layers, damped by a tenth of the mean
                          eigenvalue, as it is by default
    TRAK, dattri, traker  of this one training, projected to 128 numbers

A score is what an example adds to the loss of a query, so that those that help are negative.

PYTHONPATH=.venv/others python -m tests.bench.language_scores FOLDER TEXT [TEXT …]     beside a finished validation
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ntkexp
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.trace import find_trace, load_trace
from ntkexp.shapes import Weights
from tests.bench.language_validation import language_model, losses, of_call, texts, train

DIMENSION, GRAM, SATURATES, BY_LENGTH = 128, 3, 1.5, 0.75
Score: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Of a trained model, the texts that it learned and the queries: [query, text]."""


class Logits(nn.Module):
    """The model as a function of tokens, with plain linear layers, which are what other libraries look for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for name, layer in list(inner.named_modules()):
            if type(layer).__name__ == "Conv1D":
                weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
                plain = nn.Linear(len(weight), len(bias)).to(weight)
                plain.weight.data, plain.bias.data = weight.detach().T.contiguous(), bias.detach()
                place, _, last = name.rpartition(".")
                setattr(inner.get_submodule(place), last, plain)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return found


def loss_of_one(model: nn.Module) -> Callable[[Weights, Tensor], Tensor]:
    return lambda weights, tokens: losses(functional_call(model, weights, (tokens[None],)), tokens[None])[0]


def gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """∇ℓ of each text, [text, weight]."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    found = vmap(grad(loss_of_one(model)), (None, 0), chunk_size=25)(weights, tokens)
    return torch.cat([part.flatten(1) for part in found.values()], 1)


def products(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    return -gradients(model, asked) @ gradients(model, seen).T


def cosine(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    left, right = (functional.normalize(gradients(model, each)) for each in (asked, seen))
    return -left @ right.T


def bm25(_: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    """No model is asked."""
    known, wanted = ([grams(row) for row in each.tolist()] for each in (seen, asked))
    held = Counter(gram for row in known for gram in row)
    rare = {gram: math.log(1 + (len(known) - count + 0.5) / (count + 0.5)) for gram, count in held.items()}
    mean = sum(sum(row.values()) for row in known) / len(known)
    found = torch.zeros(len(wanted), len(known), dtype=torch.float64)
    for q, query in enumerate(wanted):
        for k, row in enumerate(known):
            shorten = SATURATES * (1 - BY_LENGTH + BY_LENGTH * sum(row.values()) / mean)
            found[q, k] = -sum(rare[g] * row[g] * (SATURATES + 1) / (row[g] + shorten) for g in query if g in row)
    return found


def grams(row: list[int]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row[start : start + GRAM]) for start in range(len(row) - GRAM + 1))


def ekfac(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    """Of linear layers, the readout among them."""
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

    task = Language()
    analyzer = Analyzer(
        "gpt2", prepare_model(model, task), task, cpu=True, disable_tqdm=True, output_dir=tempfile.mkdtemp()
    )
    train, read = TensorDataset(seen), TensorDataset(asked)
    analyzer.fit_all_factors("factors", train, per_device_batch_size=50)
    analyzer.compute_pairwise_scores("scores", "factors", read, train, per_device_query_batch_size=50)
    found: Tensor = analyzer.load_pairwise_scores("scores")["all_modules"]
    return -found.double()


def margin_of_one(model: nn.Module) -> Callable[[Weights, Tensor], Tensor]:
    """log p/(1 − p) of the mean probability that the loss stands for."""

    def margin(weights: Weights, tokens: Tensor) -> Tensor:
        loss = loss_of_one(model)(weights, tokens)
        return -loss - torch.log(-torch.expm1(-loss))

    return margin


def trak_of_dattri(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    from dattri.algorithm.trak import TRAKAttributor  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from dattri.task import AttributionTask  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    margin, one = margin_of_one(model), loss_of_one(model)
    task = AttributionTask(
        loss_func=lambda weights, batch: margin(weights, batch[0]),
        model=model,
        checkpoints=[model.state_dict()],
        target_func=lambda weights, batch: margin(weights, batch[0]),
    )
    trak = TRAKAttributor(
        task, lambda weights, batch: (-one(weights, batch[0])).exp(), projector_kwargs={"proj_dim": DIMENSION}
    )
    trak.cache(DataLoader(TensorDataset(seen), batch_size=50))
    found: Tensor = trak.attribute(DataLoader(TensorDataset(asked), batch_size=50))
    return -found.T.double()


def trak_of_traker(model: nn.Module, seen: Tensor, asked: Tensor) -> Tensor:
    """It keeps its numbers in float32."""
    from trak import TRAKer  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from trak.modelout_functions import AbstractModelOutput  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    class Margin(AbstractModelOutput):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(network: nn.Module, weights: Any, buffers: Any, tokens: Tensor) -> Tensor:
            return margin_of_one(network)({**weights, **buffers}, tokens)

        @staticmethod
        def get_out_to_loss_grad(network: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            found = losses(functional_call(network, {**weights, **buffers}, (batch[0],)), batch[0])
            return (1 - (-found).exp())[:, None]

    with tempfile.TemporaryDirectory() as place:
        scorer = TRAKer(
            model=model, task=Margin(), train_set_size=len(seen), save_dir=place, device="cpu",
            proj_dim=DIMENSION, use_half_precision=False, logging_level=logging.ERROR,
        )  # fmt: skip
        weights = model.state_dict()
        scorer.load_checkpoint(weights, model_id=0)
        for part in torch.split(seen, 50):
            scorer.featurize(batch=(part,), num_samples=len(part))
        scorer.finalize_features()
        scorer.start_scoring_checkpoint("read", weights, model_id=0, num_targets=len(asked))
        scorer.score(batch=(asked,), num_samples=len(asked))
        found = torch.as_tensor(np.asarray(scorer.finalize_scores("read"))).double()
    return -found.T


SCORES: dict[str, Score] = {
    "gradients-products": products,
    "gradients-cosine": cosine,
    "bm25": bm25,
    "ekfac-kronfluence": ekfac,
    "trak-dattri": trak_of_dattri,
    "trak-traker": trak_of_traker,
}


def main(folder: Path, files: list[str]) -> None:
    seen, asked = texts(files)
    model = language_model()
    trace = load_trace(find_trace(folder), model, of_call)
    model.load_state_dict(trace.steps.end, strict=False)
    names = digests({"input_ids": seen})
    order = torch.tensor([names.index(name) for name in trace.examples])  # as the loop first used them
    given = dict[str, NDArray[np.float64]]()
    for name, score in SCORES.items():
        began = time.process_time()
        found = score(Logits(deepcopy(model).eval()), seen, asked)
        sys.stdout.write(f"{name}: {time.process_time() - began:.1f} s of CPU\n")
        given[name] = found.detach()[:, None, order].numpy()
    again = partial(train, folder, files)
    sys.stdout.write(f"{ntkexp.validate(folder, scores=given, again=again, lower_is_better=True)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
