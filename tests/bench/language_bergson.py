"""Scores of bergson for the training of `tests.bench.language_validation`, compared with the same retrainings.

    MAGIC    the derivative of its trainer by the weight of each text, with the same steps
    EKFAC    of the linear layers at the end, with its default damping of a tenth of the mean eigenvalue
    SOURCE   from six checkpoints in three segments, with AdamW's second moments

Install bergson 2.5.1, torchopt 0.7.3 and their imports (ml_dtypes, natsort, optree, petname, simple-parsing and others;
not torchaudio and bitsandbytes) in a separate folder:

PYTHONPATH=THERE python -m tests.bench.language_bergson FOLDER TEXT [TEXT …]     FOLDER has a finished validation
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.bench.language_validation import (
    EPS,
    LENGTH,
    RATE,
    STEPS,
    WARM,
    compare,
    language_model,
    losses,
    optimizer_of,
    places,
    recorded,
    steps,
    texts,
)

CHECKPOINTS = (13, 26, 40, 53, 66, 80)  # two for each segment


# --- MAGIC


class Weighted(nn.Module):
    """The weighted mean loss of texts. The readout is the word embedding, which their trainer would untie."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.transformer = model.get_submodule("transformer")

    def each(self, tokens: Tensor) -> Tensor:
        hidden = self.transformer(input_ids=tokens, use_cache=False).last_hidden_state
        table: Any = self.transformer.wte  # its weight is not a Parameter during differentiation
        return losses(nn.functional.linear(hidden, table.weight), tokens)

    def forward(self, input_ids: Tensor, example_weight: Tensor, **_: Tensor) -> Tensor:
        if not len(example_weight):  # a query
            return self.each(input_ids)
        return (self.each(input_ids) * example_weight).sum() / example_weight.sum()


def rate(step: Tensor) -> Tensor:
    return RATE * ((step.double() + 1) / WARM).clamp(max=1) * (1 - step.double() / STEPS)


def magic(batches: list[Tensor], seen: Tensor, asked: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ∂ℓ(q)/∂w for queries q and texts, [query, text], and the final weights."""
    import torchopt  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from bergson.magic.trainer import Trainer  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    model, weights = Weighted(language_model()), nn.Parameter(torch.ones(len(seen), dtype=torch.float64))
    adamw = torchopt.adamw(lr=rate, betas=(0.9, 0.999), eps=EPS, weight_decay=1e-2, eps_root=1e-30)
    trainer, state = Trainer.initialize(model, adamw)
    state.requires_grad = True
    for batch in batches:
        given = {"input_ids": seen[batch], "labels": seen[batch], "example_weight": weights[batch]}
        state = trainer.step(state, given, trace=True)
    found = functional_call(model, state.params, (asked, weights[:0]))
    rows = [torch.autograd.grad(one, weights, retain_graph=True)[0] for one in found]
    return torch.stack(rows), {name: part.detach() for name, part in state.params.items()}


# --- EKFAC and SOURCE, which read models and texts from folders


def save_texts(tokens: Tensor, folder: Path) -> Path:
    """Save texts as a tokenized dataset."""
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415

    columns = {"input_ids": tokens.tolist(), "labels": tokens.tolist(), "length": [tokens.shape[1]] * len(tokens)}
    Dataset.from_dict(columns).save_to_disk(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save an unused tokenizer. bergson needs one, and the texts are bytes."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415  an extra
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    nothing = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=nothing, unk_token="?").save_pretrained(folder)


def save_checkpoints(seen: Tensor, folder: Path) -> list[Path]:
    """Train again, and save weights, optimizer states and learning rates as Trainer does."""
    model, rates, kept = language_model(), list[dict[str, float]](), list[Path]()
    optimizer = optimizer_of(model)
    for count, taken in enumerate(steps(optimizer, model, seen), start=1):
        rates.append({"step": count, "learning_rate": taken})
        if count in CHECKPOINTS:
            kept.append(folder / f"checkpoint-{count}")
            model.save_pretrained(kept[-1])  # type: ignore[operator]  # a method of transformers, which nn.Module lacks
            save_tokenizer(kept[-1])
            torch.save(optimizer.state_dict(), kept[-1] / "optimizer.pt")
    (folder / "log_history.json").write_text(json.dumps(rates))
    return kept


def by_factors(seen: Tensor, asked: Tensor) -> dict[str, Tensor]:
    """Return the scores of EKFAC and SOURCE, [query, text]."""
    from bergson import config  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from bergson.approx_unrolling.pipeline import (  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
        approx_unrolling_pipeline,
    )
    from bergson.data import load_scores_loss_signed  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
    from bergson.hessians.pipeline import hessian_pipeline  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = config.DataConfig(dataset=str(save_texts(seen, folder / "seen")))
        query = config.QuerySetConfig(dataset=str(save_texts(asked, folder / "asked")))
        kept = [str(each) for each in save_checkpoints(seen, folder)]
        hessian = config.HessianConfig(method="kfac", ev_correction=True, hessian_dtype="fp64")

        def ekfac(index: Any) -> None:
            of = config.HessianPipelineConfig(query=query)
            hessian_pipeline(index, hessian, config.ScoreConfig(), config.PreprocessConfig(), of)

        def source(index: Any) -> None:
            unrolled = config.ApproxUnrollingConfig(checkpoints=kept, query=query, use_adam_preconditioner=True)
            approx_unrolling_pipeline(index, hessian, unrolled)

        for name, carry_out in {"ekfac-bergson": ekfac, "source-bergson": source}.items():
            began, own = time.process_time(), {"run_path": str(folder / name), "model": kept[-1], "data": data}
            carry_out(config.IndexConfig(**own, precision="fp64", loss_reduction="mean", token_batch_size=LENGTH))
            scores, _ = load_scores_loss_signed(str(folder / name / "scores"))
            found[name] = scores.double().T
            sys.stdout.write(f"{name}: {time.process_time() - began:.1f} s of CPU\n")
    return found


def main(folder: Path, files: list[str]) -> None:
    (seen, asked), trace = texts(files), recorded(folder)
    batches = [places((name for call in calls for name in call.names), seen) for calls in trace.steps.calls()]
    found, end = magic(batches, seen, asked)
    off = max(float((end[name] - weight).abs().max()) for name, weight in trace.steps.end.items())
    sys.stdout.write(f"weights at the end differ by {off:.0e}\n")
    compare(folder, files, {"magic-bergson": found, **by_factors(seen, asked)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
