"""The first line of the table in docs/attribution.md: a small GPT-2 learns a text by bytes, and scores of its training
texts are compared with trainings without 1 % of them.

python -m tests.bench.language_validation FOLDER TEXT [TEXT …]     some 40 minutes on two cores; it goes on when killed
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.model.foreign import load_torchvision

TEXTS, QUERIES, LENGTH, BATCH, EPOCHS = 400, 50, 32, 20, 4
RATE, WARM, STEPS, EPS = 2e-3, 10, EPOCHS * TEXTS // BATCH, 1e-2  # of AdamW; this `eps` makes it smooth


def texts(files: list[str]) -> tuple[Tensor, Tensor]:
    """Draw training texts and queries from the bytes of files."""
    content = b"".join(Path(file).read_bytes() for file in files)
    order = torch.randperm(len(content) // LENGTH, generator=torch.Generator().manual_seed(0))[: TEXTS + QUERIES]
    pieces = [bytearray(content[start * LENGTH : (start + 1) * LENGTH]) for start in order.tolist()]
    rows = torch.stack([torch.frombuffer(piece, dtype=torch.uint8).long() for piece in pieces])
    return rows[:TEXTS], rows[TEXTS:]


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of each text."""
    predicted = logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(predicted, tokens[:, 1:], reduction="none").mean(1)


def of_call(outputs: Tensor, call: Any) -> Tensor:
    """Return the losses of a call. It is both measure and loss."""
    return losses(outputs, call.kwargs["input_ids"])


def language_model() -> nn.Module:
    """Return the untrained model."""
    load_torchvision()  # transformers needs it imported first
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  an extra

    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**size, **dropouts, attn_implementation="eager")).double()
    return model


def steps(optimizer: torch.optim.Optimizer, model: nn.Module, seen: Tensor) -> Iterator[float]:
    """Train, and yield the learning rate of each step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM) * (1 - step / STEPS))
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(TEXTS), BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(losses(model(input_ids=seen[batch]).logits, seen[batch]).mean())
            optimizer.step()
            yield float(schedule.get_last_lr()[0])
            schedule.step()


def train(folder: Path, files: list[str]) -> Trace:
    """Train from the seeds, and follow the loop."""
    model = language_model()
    seen, asked = texts(files)
    optimizer = optimizer_of(model)
    queries = {"input_ids": asked}
    with ntkexp.follow(
        model, optimizer, queries=queries, output="logits", measure=of_call, loss=of_call, to=folder
    ) as trace:
        for _ in steps(optimizer, model, seen):
            pass
    return trace


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS)


def places(names: Iterable[str], seen: Tensor) -> Tensor:
    """Return the indices of texts with these names."""
    known = digests({"input_ids": seen})
    return torch.tensor([known.index(name) for name in names])


def compare(folder: Path, files: list[str], scores: Mapping[str, Tensor]) -> None:
    """Compare scores [query, text] with retrainings. Positive scores raise the loss."""
    order = places(recorded(folder).examples, texts(files)[0])  # in the order of their first use
    given = {name: found.detach()[:, None, order].numpy() for name, found in scores.items()}
    again = partial(train, folder, files)
    sys.stdout.write(f"{ntkexp.validate(folder, scores=given, again=again, lower_is_better=True)}\n")


def recorded(folder: Path) -> Trace:
    """Load the loop in a folder, with the module at its initial weights."""
    return load_trace(find_trace(folder), language_model(), of_call)


def main(folder: Path, files: list[str]) -> None:
    again = partial(train, folder, files)
    if not (folder / "DONE.json").is_file():
        again().attribute(effects=True)
    sys.stdout.write(f"{ntkexp.validate(folder, again=again, lower_is_better=True)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
