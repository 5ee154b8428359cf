"""`ntkexp config`: what would run, every choice there is, or how the kernel of an experiment would be read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import ConfigDir, Overrides, Trust
from ntkexp.text import aligned

if TYPE_CHECKING:
    from ntkexp.experiment.experiment import Experiment


def config(
    overrides: Overrides = None,
    everything: Annotated[bool, typer.Option("--tree", help="Show every group and option there is instead.")] = False,
    cost: Annotated[
        bool, typer.Option("--plan", help="Show how the kernel would be read instead, and what that costs.")
    ] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show what would run, as YAML."""
    if everything:
        from ntkexp.config.choices import Choices, folders, tree

        text = tree(Choices(folders(config_dir)))
    elif cost:
        from ntkexp.config.compose import compose

        text = cost_table(compose(overrides or [], config_dir, trust or []))
    else:
        from ntkexp.config.compose import resolve

        text = resolve(overrides or [], config_dir, trust or []).as_yaml()
    sys.stdout.write(text)


# --- `ntkexp config --plan`: how the kernel of an experiment would be read, as a table.


WAYS = """
one product       ⟨a, a′⟩⟨β, β′⟩ from one pair of factors an example
double sum        the same for every pair of uses
multiplied out    gradients from their factors, and inner products of them
gradients         inner products of gradients: of gains, positions, shared and computed weights
Jacobians         the same, from a back-propagation for every example and output: an operation has no rule
"""


def cost_table(experiment: Experiment) -> str:
    """Tabulate the cost, a line for each group of parameters; a multiplication and an addition are two operations."""
    from ntkexp.kernel.read.reader import Cost
    from ntkexp.run.setting import survey

    seen = survey(experiment.model_copy(update={"device": "cpu"}))  # shapes tell it, wherever the run will be
    points, costs = seen.points, seen.costs
    title = f"The kernel of {points.block} points with {points.train} training examples, at every reading of every step"
    total = Cost("in total", "", 0, sum(each.bytes for each in costs), sum(each.multiplications for each in costs))
    rows = [
        (each.parameters, each.way, str(each.uses or ""), f"{each.bytes / 1e6:.1f}",
         f"{2 * each.multiplications / 1e9:.3f}")
        for each in [*costs, total]
    ]  # fmt: skip
    header = ("parameters", "way", "uses", "MB", "GFLOP")
    return f"{title}\n\n{aligned(header, rows, [False, False, True, True, True])}\n\n{WAYS.strip()}\n"
