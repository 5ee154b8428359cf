"""`ntkexp kernel tangent`: the tangent kernel of networks as they are drawn, or of a run, into a file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.kernel_files import Filling, compose_for_tiles, default_path, show_matrix, tiles_at_once
from ntkexp.cli.options import (
    AsJson,
    ConfigDir,
    Engine,
    FillDryRun,
    KernelFile,
    Overrides,
    Quiet,
    Recompute,
    Tiles,
    Trust,
)
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.kernel.read.plan import Outputs
    from ntkexp.records.folder import RunFolder


class When(StrEnum):
    """Which weights of a run are meant."""

    start = "start"
    end = "end"


def tangent(
    overrides: Overrides = None,
    out: KernelFile = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEEDS", help="The seeds of the networks to average over, such as 0..9."),
    ] = None,
    outputs: Annotated[
        str,
        typer.Option(
            "--outputs",
            metavar="all|trace|0,3",
            help="The outputs between which the kernel is taken: all, some by number, or their trace.",
        ),
    ] = "all",
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="Take the network of this run instead.")
    ] = None,
    when: Annotated[
        When,
        typer.Option(
            "--at",
            metavar="|".join(When),
            help="Take the weights of the run before training (start) or after it (end).",
        ),
    ] = When.end,
    workers: Tiles = None,
    engine: Engine = "local",
    dry_run: FillDryRun = False,
    force: Recompute = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compute the tangent kernel of a network as it is drawn, or of a finished run."""
    overrides, trust = overrides or [], trust or []
    if run is not None:
        refuse_no_run(run, " ".join(overrides) or "--seeds" * (seeds is not None))
    from ntkexp.engine.base import choose

    chosen = choose(engine, workers)
    if run is None:
        experiment = compose_for_tiles(overrides, config_dir, trust)
        from ntkexp.kernel_file.kernel import EmpiricalKernel
        from ntkexp.sweep.definition import values, whole_numbers

        drawn = (experiment.seed,) if seeds is None else tuple(whole_numbers(values("--seeds", seeds)))
        weights = ""
    else:
        from ntkexp.config.build import admit
        from ntkexp.kernel_file.kernel import EmpiricalKernel
        from ntkexp.run.environment import fix_circumstances
        from ntkexp.run.execute import rebuilt

        written = finished(run)
        experiment = rebuilt(written, admit(trust))
        fix_circumstances(experiment, experiment.threads or 1)
        drawn, weights = (), str((written.path / "weights.pt").absolute())
    wanted = read_outputs(outputs)
    kernel = EmpiricalKernel(experiment, experiment.draw(), tiles_at_once(chosen), drawn, wanted, weights, when.value)
    filling = Filling(kernel, (out or default_path(kernel)).expanduser(), chosen, workers, force)
    if dry_run:
        filling.show(as_json=as_json)
    else:
        show_matrix(filling.carry_out(trust, quiet=quiet), quiet=quiet, as_json=as_json)


def refuse_no_run(run: Path, surplus: str) -> None:
    """Refuse a run beside words that say as well what the network is, and a folder that is none."""
    if surplus:
        raise Mistake(f"--run={run} says which network and which data; leave out {surplus}")
    if not (run.expanduser() / "config.json").is_file():
        raise Mistake(f"--run={run} is no run folder: it has no config.json")


def finished(run: Path) -> RunFolder:
    """The folder of a run that is finished, its weights as they were written."""
    from ntkexp.records.folder import RunFolder

    written = RunFolder(run.expanduser())
    if written.state in {"running", "interrupted", "dead"}:
        raise Mistake(f"--run={run} is not finished; `ntkexp resume` goes on with it")
    written.check("weights.pt")
    return written


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
