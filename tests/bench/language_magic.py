"""MAGIC of bergson for the training of `tests.bench.language_validation`, compared with the same retrainings.

Its trainer takes the same steps, and is differentiated by the weight of each text.

bergson 2.5.1 and torchopt 0.7.3 with what they import (ml_dtypes, natsort, optree, petname, simple-parsing and others;
not torchaudio and bitsandbytes) lie in a folder of their own:

PYTHONPATH=THERE python -m tests.bench.language_magic FOLDER TEXT [TEXT …]     beside a finished validation
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.bench.language_validation import (
    EPS,
    RATE,
    STEPS,
    WARM,
    compare,
    language_model,
    losses,
    places,
    recorded,
    texts,
)


class Weighted(nn.Module):
    """The mean loss of texts by their weights; the readout is the table of words, which their trainer would untie."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.transformer = model.get_submodule("transformer")

    def each(self, tokens: Tensor) -> Tensor:
        hidden = self.transformer(input_ids=tokens, use_cache=False).last_hidden_state
        table: Any = self.transformer.wte  # whose weight is no Parameter while it is differentiated
        return losses(nn.functional.linear(hidden, table.weight), tokens)

    def forward(self, input_ids: Tensor, example_weight: Tensor, **_: Tensor) -> Tensor:
        if not len(example_weight):  # asked, not trained
            return self.each(input_ids)
        return (self.each(input_ids) * example_weight).sum() / example_weight.sum()


def rate(step: Tensor) -> Tensor:
    return RATE * ((step.double() + 1) / WARM).clamp(max=1) * (1 - step.double() / STEPS)


def scores(batches: list[Tensor], seen: Tensor, asked: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """∂ℓ(q)/∂w of every query and text, [query, text], and the weights at the end."""
    # both lie in another environment, and mypy may not see them
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


def main(folder: Path, files: list[str]) -> None:
    (seen, asked), trace = texts(files), recorded(folder)
    batches = [places((name for call in calls for name in call.names), seen) for calls in trace.steps.calls()]
    found, end = scores(batches, seen, asked)
    off = max(float((end[name] - weight).abs().max()) for name, weight in trace.steps.end.items())
    sys.stdout.write(f"weights at the end differ by {off:.0e}\n")
    compare(folder, files, {"magic-bergson": found})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
