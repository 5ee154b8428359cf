"""`ntkexp config`: what would run, every choice there is, or how the kernel of an experiment would be read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import ConfigDir, Overrides, Trust
from ntkexp.report.tables import Column, Table, format_text

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


COLUMNS = (
    *(Column("parameters", number=False), Column("way", number=False), Column("uses")),
    *(Column("MB", spell="{:.1f}".format), Column("GFLOP", spell="{:.3f}".format)),
)
WAYS = """
one product       ⟨a, a′⟩⟨β, β′⟩ from one pair of factors an example
double sum        the same for every pair of uses
multiplied out    gradients from their factors, and inner products of them
gradients         inner products of gradients: of gains, positions, shared and computed weights
Jacobians         the same, from a back-propagation for every example and output: an operation has no rule
"""


def cost_table(experiment: Experiment) -> str:
    """Tabulate the cost of reading the kernel, a line for each group of parameters."""
    from ntkexp.kernel.read.reader import Cost
    from ntkexp.run.setting import survey

    seen = survey(experiment.model_copy(update={"device": "cpu"}))  # shapes tell it, wherever the run will be
    points, costs = seen.points, seen.costs
    title = f"The kernel of {points.block} points with {points.train} training examples, at every reading of every step"
    total = Cost("in total", "", 0, sum(each.bytes for each in costs), sum(each.multiplications for each in costs))
    rows = tuple(  # a multiplication and an addition are two operations
        (each.parameters, each.way, each.uses or "", each.bytes / 1e6, 2 * each.multiplications / 1e9)
        for each in [*costs, total]
    )
    return f"{title}\n\n{format_text(Table(COLUMNS, rows))}\n\n{WAYS.strip()}\n"
