"""Every cell closes: measure × components × positions × optimizer × precision, of one small language model.

python -m tests.foreign_loop.test_cells     the table of docs/attribution.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from itertools import cycle, product
from typing import TypeAlias

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall
from tests.foreign_loop.loops import WORDS, Language
from tests.foreign_loop.test_positions import LONGEST, loss_of, texts

STEPS, BRAIN = 6, torch.bfloat16
SUMMED = 100  # eps: some steps, each a sum of some tens of terms, relative to all terms

Weights: TypeAlias = Iterable[nn.Parameter]
Optimizers: TypeAlias = list[torch.optim.Optimizer]


def muon(weights: Weights) -> Optimizers:
    """Muon for matrices, as its authors use it, and AdamW for the rest."""
    known = list(weights)
    matrices, others = ([each for each in known if (each.dim() == 2) is flat] for flat in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def one(kind: Callable[..., torch.optim.Optimizer], **settings: object) -> Callable[[Weights], Optimizers]:
    return lambda weights: [kind(weights, **settings)]


OPTIMIZERS: Mapping[str, Callable[[Weights], Optimizers]] = {
    "SGD": one(torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": one(torch.optim.Adam, lr=0.02, amsgrad=True, weight_decay=0.01),
    "AdamW": one(torch.optim.AdamW, lr=0.02),
    "RMSprop": one(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": one(torch.optim.Adagrad, lr=0.05),
    "Adadelta": one(torch.optim.Adadelta, lr=1.0),
    "Adamax": one(torch.optim.Adamax, lr=0.02),
    "NAdam": one(torch.optim.NAdam, lr=0.02),
    "RAdam": one(torch.optim.RAdam, lr=0.02),
    "Adafactor": one(torch.optim.Adafactor, lr=0.02),
    "ASGD": one(torch.optim.ASGD, lr=0.3),
    "Muon": muon,
}


def measures(outputs: Tensor, call: SeenCall) -> dict[str, Tensor]:
    """Measures of the word after each text; the first word of the text is its label."""
    (inputs,) = call.args
    assert isinstance(inputs, Tensor)
    last, asked = outputs[:, -1], inputs[:, 0]
    logarithms = last.log_softmax(1).gather(1, asked[:, None]).squeeze(1)
    others = last.masked_fill(functional.one_hot(asked, WORDS).bool(), -torch.inf)
    return {
        "output": last[:, 0],
        "loss": functional.cross_entropy(last, asked, reduction="none"),
        "log-probability": logarithms,
        "probability": logarithms.exp(),
        "margin": last.gather(1, asked[:, None]).squeeze(1) - others.logsumexp(1),
    }


CASTS = {"bfloat16 autocast": BRAIN, "float16 autocast": torch.float16, "frozen bfloat16": BRAIN}
PRECISIONS = ("float64", "float32", *CASTS)


def model_of(precision: str) -> Language:
    """The model in these numbers. Over a frozen base, the other layers are trained."""
    model = Language().to(torch.float64 if precision == "float64" else torch.float32)
    if precision.startswith("frozen"):
        for base in (model.words, model.read):
            base.to(BRAIN).requires_grad_(False)
    return model


def measured(model: nn.Module, queries: Tensor) -> Tensor:
    """The present measures, in long numbers, [query, measure]."""
    with torch.no_grad():
        found = measures(deepcopy(model).double().eval()(queries), SeenCall.of(queries))
    return torch.stack(list(found.values()), 1)


def closures(optimizers: Callable[[Weights], Optimizers], precision: str) -> pd.DataFrame:
    """The gaps between parts and changes of measures, and of parts by component and position, relative to the parts."""
    torch.manual_seed(0)
    model, given, queries = model_of(precision), texts(), torch.randint(WORDS, (3, LONGEST))
    before, used = measured(model, queries), optimizers(weight for weight in model.parameters() if weight.requires_grad)
    with ntkexp.follow(model, used, queries=queries, measure=measures) as trace:
        for step in range(STEPS):
            batch = given[step % 2]
            model.zero_grad()
            with torch.autocast("cpu", CASTS[precision]) if precision in CASTS else nullcontext():
                loss = loss_of(model(batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            for optimizer in used:
                optimizer.step()
    found = trace.attribute(by="parameter", positions=True, quiet=True)

    parts, change = found["contribution"], (measured(model, queries) - before).numpy()
    size = abs(parts).sum("example") + sum(abs(found[name]) for name in ("decay", "start", "change"))
    whole = parts.sum("example") + found["decay"] + found["rounding"]
    missed = {
        "all examples": abs(whole - change) / size,
        "parameters": (abs(found["by_component"].sum("component") - parts) / size).max("example"),
        "positions": (abs(found["by_position"].sum("position") - parts) / size).max("example"),
    }
    return pd.DataFrame({name: each.max("query").to_pandas() for name, each in missed.items()})


@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
@pytest.mark.sample(3)
@pytest.mark.parametrize(  # every optimizer with both precisions, and with one of the casts
    ("optimizer", "precision"),
    [
        *product(OPTIMIZERS, ("float64", "float32")),
        *zip(OPTIMIZERS, cycle(CASTS), strict=False),
    ],
)
def test_every_cell_closes(optimizer: str, precision: str) -> None:
    eps = torch.finfo(torch.float64 if precision == "float64" else torch.float32).eps
    missed = closures(OPTIMIZERS[optimizer], precision)
    assert missed.notna().to_numpy().all()
    assert missed.to_numpy().max() <= SUMMED * eps, missed


def tables() -> str:
    """The largest gaps, by optimizer and precision, and in double precision by measure."""
    found = {(name, kind): closures(make, kind) for name, make in OPTIMIZERS.items() for kind in PRECISIONS}
    of_all = {name: {kind: found[name, kind].to_numpy().max() for kind in PRECISIONS} for name in OPTIMIZERS}
    of_double = pd.concat([found[name, "float64"] for name in OPTIMIZERS]).groupby(level=0, sort=False).max()
    return f"{table('optimizer', pd.DataFrame(of_all).T)}\n{table('measure, in float64', of_double)}"


def table(head: str, numbers: pd.DataFrame) -> str:
    lines = [" | ".join([head, *map(str, numbers)]), "---" + "|--:" * numbers.shape[1]]
    for name, row in zip(numbers.index, numbers.to_numpy(), strict=True):
        lines.append(" | ".join([str(name), *(f"{each:.0e}" for each in row)]))
    return "".join(f"| {line} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(tables())
