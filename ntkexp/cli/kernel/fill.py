"""`ntkexp kernel limit` and `ntkexp kernel tangent`: which kernel is to be computed into a file, and of what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.kernel.order import FOLDER, Order, carry_out
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.cli.kernel.request import FillRequest
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.kernel.read.outputs import Outputs


def limit(asked: FillRequest) -> None:
    """Compute the kernels of infinite width into a file."""
    carry_out(order_limit(asked, asked.choose_engine(), FOLDER))


def order_limit(asked: FillRequest, engine: AbstractEngine, folder: Path) -> Order:
    """Order the kernels of infinite width, in a folder if the file has no name."""
    experiment = asked.compose()
    from ntkexp.kernel_file.fill.limit import LimitRecipe

    return Order(asked, engine, experiment, LimitRecipe(), folder)


def tangent(asked: FillRequest, seeds: str | None, outputs: str) -> None:
    """Compute the tangent kernel of networks as they are drawn."""
    engine = asked.choose_engine()
    experiment = asked.compose()
    from ntkexp.kernel_file.fill.tangent import StartRecipe
    from ntkexp.sweep.axis_values import values
    from ntkexp.sweep.parse import whole_numbers

    chosen = (experiment.seed,) if seeds is None else tuple(whole_numbers(values("--seeds", seeds)))
    carry_out(Order(asked, engine, experiment, StartRecipe(chosen, read_outputs(outputs))))


def tangent_of_run(asked: FillRequest, seeds: str | None, outputs: str, run: Path, when: str) -> None:
    """Compute the tangent kernel of the network of a run."""
    if asked.overrides or seeds is not None:
        surplus = " ".join(asked.overrides) or "--seeds"
        raise Mistake(f"--run={run} says which network and which data; leave out {surplus}")
    folder = run.expanduser()
    if not (folder / "config.json").is_file():
        raise Mistake(f"--run={run} is no run folder: it has no config.json")
    engine = asked.choose_engine()
    from ntkexp.config.target import admit
    from ntkexp.kernel_file.fill.tangent import CheckpointRecipe
    from ntkexp.records.folder import RunFolder
    from ntkexp.run.environment import fix_circumstances
    from ntkexp.run.execute import rebuilt

    written = RunFolder(folder)
    if written.state in {"running", "interrupted", "dead"}:
        raise Mistake(f"--run={run} is not finished; `ntkexp resume` goes on with it")
    written.check("weights.pt")
    experiment = rebuilt(written, admit(asked.trust))
    fix_circumstances(experiment, experiment.threads or 1)
    recipe = CheckpointRecipe(str((folder / "weights.pt").absolute()), when, read_outputs(outputs))
    carry_out(Order(asked, engine, experiment, recipe))


def read_outputs(outputs: str) -> Outputs:
    """Read which outputs are meant: all, their trace, or some of them by number."""
    match outputs:
        case "all":
            return "all"
        case "trace":
            return "trace"
    try:
        return [int(number) for number in outputs.split(",")]
    except ValueError:
        raise Mistake(f"--outputs={outputs}: it takes all, trace, or numbers of outputs, such as 0,3") from None
