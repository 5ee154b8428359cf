"""Draw the pictures of the README and of the tutorials.

`python -m tests.docs.pictures` draws all pictures except `ladder.png`, if possible by the code on their pages.
`python -m tests.docs.pictures RUN` also draws `ladder.png`, with five kernel machines of the default run in the folder
RUN.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import ntkexp
from ntkexp.cli.main import run as cli
from ntkexp.library import ascend, tangent_kernel
from ntkexp.model.scalar import RadialBasis
from ntkexp.report.known_effects import known_effects
from ntkexp.report.loaded_run import LoadedRun
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.examples import checked
from ntkexp.report.plots.figures import ladder
from ntkexp.report.plots.rendering import write
from ntkexp.report.plots.style import BLUE, GREEN, GREY, NARROW, VERMILION, WIDE, End, heading, house_style, name_ends
from tests.docs.pages import Page
from tests.run.small import execute_in, small

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = ("secant", "left", "frozen_start", "frozen_limit", "rbf_regression")
OWN_LOOP_TITLE = "These images made this a"


def draw_ladder(run: LoadedRun) -> None:
    few = tuple(row for row in run.ladder if row.machine in SHOWN)
    with house_style():
        figure = ladder.draw(replace(run, ladder=few), Canvas())
        assert figure is not None
        write(figure, DOCS / "ladder.png", "png")


def draw_own_loop() -> None:
    """Draw the picture "These images made this a 5" with the code of its notebook."""
    cells = json.loads((DOCS / "notebooks" / "your_own_loop.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    values: dict[str, Any] = {}
    with house_style():
        for text in code[: 1 + next(k for k, text in enumerate(code) if OWN_LOOP_TITLE in text)]:
            exec(text, values)  # the code of the notebook
        write(values["figure"], DOCS / "your_own_loop.png", "png")


def page_values(name: str) -> dict[str, Any]:
    """Run the programs of a page, and return their variables."""
    values: dict[str, Any] = {}
    with TemporaryDirectory() as folder, chdir(folder):
        for block in Page(DOCS / name).blocks:
            if block.language == "python":
                exec(block.text, values)  # the code of the page
    return values


def draw_first_attribution() -> None:
    found = page_values("first-attribution.md")["found"]
    with house_style():
        axes = found.plot.contributions(query=0, out=7, top=8, title="Examples behind output 7 of query 0")
        write(axes.figure, DOCS / "first-attribution.svg", "svg")


def draw_followed_loop() -> None:
    """Draw three plots of the attribution of the loop in docs/first-attribution.md."""
    trace = page_values("first-attribution.md")["trace"]
    found = trace.attribute(by="module", quiet=True)
    with house_style():
        figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
        examples, layers, steps = figure.subplots(1, 3)
        found.plot.contributions(0, out=7, top=8, ax=examples, title="plot.contributions")
        found.plot.components(0, out=7, ax=layers, title="plot.components")
        found.plot.timeline(0, out=7, ax=steps, title="plot.timeline")
        write(figure, DOCS / "follow.svg", "svg")


def draw_optimizers() -> None:
    """Draw the change of one query's output over the steps of three optimizers."""
    optimizers: dict[str, Callable[[Any], Any]] = {
        "SGD": lambda weights: torch.optim.SGD(weights, lr=0.05),
        "momentum": lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9),
        "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.02),
    }
    ends = []
    with house_style():
        figure = Figure(figsize=(NARROW, 2.2), layout="constrained")
        axes = figure.subplots()
        for (name, optimizer), color in zip(optimizers.items(), (BLUE, VERMILION, GREEN), strict=True):
            torch.manual_seed(0)
            x, y = torch.randn(40, 3).double(), torch.randn(40, 1).double()
            model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).double()
            moved = optimizer(model.parameters())
            with ntkexp.follow(model, moved, queries=x[:1]) as trace:
                for _ in range(60):
                    moved.zero_grad()
                    (model(x) - y).square().mean().backward()
                    moved.step()
            so_far = trace.attribute(quiet=True)["by_step"][0, 0].cumsum("step").to_numpy()
            axes.plot(np.arange(1, 61), so_far, color=color)
            ends.append(End(name, float(so_far[-1]), color))
        axes.set(xlabel="step", ylabel="change by examples", xlim=(0, 60))
        name_ends(axes, ends)
        heading(figure, "One query under three optimizers")
        write(figure, DOCS / "optimizers.svg", "svg")


def draw_effects() -> None:
    """Draw predicted against actual leave-out effects of the loop in docs/follow-effects.md."""
    with TemporaryDirectory() as folder, chdir(folder):
        Page(DOCS / "follow-effects.md").files(Path(folder))
        values: dict[str, Any] = {}
        exec(Path("my_loop.py").read_text("utf-8"), values)  # the code of the page
        train = values["train"]
        train().attribute(effects=True, again=train, quiet=True)
        known = known_effects(ntkexp.load_run("outputs/runs/again"))
        assert known is not None
        assert known.check is not None
        assert known.agreement is not None
    with house_style():
        picture = checked(known.check, known.agreement)
        write(picture.figure, DOCS / "effects.svg", "svg")


def draw_run(folder: Path, words: Sequence[str], figure: str, name: str) -> None:
    """Draw one of the pictures of a run of `ntkexp train`."""
    assert cli(["train", *words, f"--out={folder}", "--quiet"]) == 0
    (place,) = (folder / "runs").iterdir()
    with house_style():
        axes = getattr(ntkexp.load_run(place).plot, figure)()
        first = axes[0] if isinstance(axes, list) else axes
        write(first.figure, DOCS / name, "svg")


def draw_runs() -> None:
    phases = ["data=sequence", "data.phases=[[0,1],[2,3]]", "data.train=60", "data.query=40", "data.test=40"]
    with TemporaryDirectory() as folder:
        draw_run(Path(folder, "a"), [*phases, "model.width=64", "steps=60"], "tasks", "tasks.svg")
        draw_run(Path(folder, "b"), ["model.width=64", "steps=100"], "contributions", "run-contributions.svg")


def draw_huber() -> None:
    residual = np.linspace(-2, 2, 201)
    delta = 0.5
    value = np.where(abs(residual) <= delta, residual**2 / 2, delta * (abs(residual) - delta / 2))
    lines = {"ℓ": (value, BLUE), "∂ℓ/∂f": (residual.clip(-delta, delta), VERMILION), "r²/2": (residual**2 / 2, GREY)}
    with house_style():
        figure = Figure(figsize=(NARROW, 2.2), layout="constrained")
        axes = figure.subplots()
        for line, color in lines.values():
            axes.plot(residual, line, color=color)
        axes.set(xlabel="residual r = f − y", ylabel="loss", xlim=(-2, 2))
        name_ends(axes, [End(name, float(line[-1]), color) for name, (line, color) in lines.items()])
        heading(figure, "The Huber loss with δ = 0.5")
        write(figure, DOCS / "huber.svg", "svg")


CHILD_STEPS = (0, 5, 10, 20, 50, 100, 200)
CHILD = (
    *("model.width=32", "init=standard", "data.classes=all", "data.train=60", "data.query=100", "data.test=0"),
    *("data.seed=0", "loss=cross_entropy", "optimizer=sgd", "optimizer.batch=5", "optimizer.step_size=0.1"),
    *("steps=400", "path.kernels=none", "path.rule=[left]", "path.error_samples=0", "path.outputs=[0]", "threads=1"),
    *("path.queries=[query]", "ladder.machine=[]", "path.record=[outputs,weights]"),
)


def distances_of_children(folder: Path) -> dict[int, list[float]]:
    """Return ‖f_a − f_b‖/‖f_a − f_0‖ at the queries for each pair of three children, by the step of their parent."""

    def trained(name: str, *words: str) -> LoadedRun:
        return ntkexp.load_run(execute_in(folder / name, small(*CHILD, *words), [*CHILD, *words]))

    parent = trained("parent", f"path.schedule=[{','.join(map(str, CHILD_STEPS))}]")
    start = parent.outputs_at(0)
    found = {}
    for step in CHILD_STEPS:
        child = f"init.parent={folder / 'parent'}@{step}", "path.schedule=400"
        ends = [trained(f"{step}-{seed}", *child, f"seed={seed}").outputs_at(400) for seed in (1, 2, 3)]
        found[step] = [float(np.linalg.norm(a - b) / np.linalg.norm(a - start)) for a, b in combinations(ends, 2)]
    return found


def draw_children() -> None:
    """Draw the distance between children with different orders of examples, by the step of their parent (Fort et al.
    2020)."""
    with TemporaryDirectory() as folder:
        found = distances_of_children(Path(folder))
    steps, means = list(found), [fmean(pairs) for pairs in found.values()]
    print("\n".join(f"| {step} | {100 * mean:.0f} % |" for step, mean in zip(steps, means, strict=True)))
    with house_style():
        figure = Figure(figsize=(NARROW, 2.2), layout="constrained")
        axes = figure.subplots()
        for step, pairs in found.items():
            axes.plot([step] * len(pairs), pairs, "o", color=GREY, markersize=3)
        axes.plot(steps, means, color=BLUE)
        axes.set_xscale("symlog", linthresh=5, linscale=0.4)
        axes.set(xlabel="step of the parent", ylabel="distance of outputs", xlim=(-0.5, 250), ylim=(0, None))
        axes.set_xticks([0, 5, 10, 20, 50, 100, 200], ["0", "5", "10", "20", "50", "100", "200"])
        heading(figure, "Children of later parents agree", "Line: mean. Points: pairs of children with other batches.")
        write(figure, DOCS / "children.svg", "svg")


def draw_bumps() -> None:
    """Draw the kernel of a function of one number before and after training."""
    bumps, x = RadialBasis().function(), torch.arange(-10.0, 21.0, dtype=torch.float64)[:, None]
    ten = x[20:21]
    trained = ascend(bumps, ten, steps=15, step_size=1.0)
    lines = {
        "before": (tangent_kernel(bumps, x, ten).flatten(), GREY),
        "after 15 steps": (tangent_kernel(bumps, x, ten, weights=trained).flatten(), BLUE),
    }
    with house_style():
        figure = Figure(figsize=(NARROW, 2.2), layout="constrained")
        axes = figure.subplots()
        for kernel, color in lines.values():
            axes.plot(x.flatten(), kernel, color=color)
        axes.axvline(10, color=GREY, linewidth=0.5)
        axes.set(xlabel="x", ylabel="k(x, 10)", xlim=(-10, 20))
        name_ends(axes, [End(name, float(kernel[-1]), color) for name, (kernel, color) in lines.items()])
        heading(figure, "Training changes the kernel")
        write(figure, DOCS / "bumps.svg", "svg")


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_ladder(ntkexp.load_run(sys.argv[1]))
    for draw_picture in (
        *(draw_own_loop, draw_first_attribution, draw_followed_loop, draw_optimizers, draw_effects),
        *(draw_runs, draw_huber, draw_bumps, draw_children),
    ):
        draw_picture()
