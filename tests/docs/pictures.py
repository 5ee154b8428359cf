"""Draw the pictures of the README: `python -m tests.docs.pictures`.

`ladder.png` shows five kernel machines of the default run, which must be finished in `outputs`.
`explain.png` shows the training images behind one prediction of a followed CNN.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ntkexp
from ntkexp.report.examples import Example
from ntkexp.report.loaded_run import LoadedRun
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.examples import COLOURS_IN_WORDS, Explained, draw
from ntkexp.report.plots.figures import ladder
from ntkexp.report.plots.rendering import write
from ntkexp.report.plots.style import heading, house_style

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = ("secant", "left", "frozen_start", "frozen_limit", "rbf_regression")
QUERY, CLASS = 1, 5  # a handwritten 5 among the queries


def draw_ladder(run: LoadedRun) -> None:
    few = tuple(row for row in run.ladder if row.machine in SHOWN)
    with house_style():
        figure = ladder.draw(replace(run, ladder=few), Canvas())
        assert figure is not None
        write(figure, DOCS / "ladder.png", "png")


def draw_explanation() -> None:
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets)
    fives = (labels[400:] == CLASS).nonzero().flatten() + 400
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = TensorDataset(images[:300], labels[:300])
    queries = images[fives[:6]]

    def log_probability(outputs: Tensor, call: object) -> Tensor:
        return outputs.log_softmax(1)[:, CLASS]

    with ntkexp.follow(model, optimizer, queries=queries, ids="dataset", measure=log_probability) as trace:
        for _ in range(8):
            for x, y in DataLoader(data, batch_size=32, shuffle=True):
                optimizer.zero_grad()
                loss: Tensor = nn.functional.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    found = trace.attribute()
    assert int(model(queries)[QUERY].argmax()) == CLASS
    added = found["contribution"].isel(query=QUERY, out=0)
    order = added.argsort().to_numpy()[::-1][:8]
    numbers = added["example"].to_numpy().astype(int)[order]
    log_p = (found["start"] + found["change"]).isel(query=QUERY, out=0)
    row = Explained(
        role="predicted",
        prediction=f"p({CLASS}) = {math.exp(float(log_p)):.2f}",
        point=Example(0, str(CLASS), np.asarray(images[fives[QUERY]])),
        top=tuple(Example(k, str(int(labels[k])), np.asarray(images[k])) for k in numbers.tolist()),
        shares=added.to_numpy()[order],
    )
    with house_style():
        figure = draw([row])
        heading(figure, f"These images made this a {CLASS}", COLOURS_IN_WORDS)
        write(figure, DOCS / "explain.png", "png")


if __name__ == "__main__":
    draw_ladder(ntkexp.load_run(sys.argv[1]))
    draw_explanation()
