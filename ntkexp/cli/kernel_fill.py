"""`ntkexp kernel limit` and `tangent`: write kernels of infinite
and finite width into a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ntkexp.cli.options import (
    AGAIN,
    CommonOptions,
    Engine,
    Overrides,
    interruptible,
    sigterm_as_interrupt,
    trusted,
    write_json,
)
from ntkexp.mistake import Mistake
from ntkexp.report.progress import progress_listener

if TYPE_CHECKING:
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.kernel.read.plan import ChosenOutputs
    from ntkexp.kernel_file.fill import RemainingWork
    from ntkexp.kernel_file.kernel import AbstractKernel
    from ntkexp.records.atomic import Json
    from ntkexp.records.kernel_file import KernelMatrix


KERNELS_FOLDER = Path("outputs") / "kernels"
"""The default folder of kernel files."""

KernelFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="The kernel file; by default, a file in outputs/kernels.",
    ),
]
Tiles: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="The number of tiles at once; by default, one for each core.",
    ),
]


@dataclass(frozen=True)
class FillOptions:
    """Options of the commands that write one kernel file."""

    workers: Tiles = None
    engine: Engine = "local"
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate the core hours, and compute nothing."),
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Compute the kernel again, even if the file is finished."
        ),
    ] = False


def compose_for_tiles(
    overrides: Sequence[str] | None, common: CommonOptions
) -> Experiment:
    """Compose the experiment whose settings define the kernel. If `threads` is not set,
    torch uses one thread."""
    experiment = common.compose(overrides)
    from ntkexp.run.environment import fix_circumstances

    fix_circumstances(experiment, experiment.threads or 1)
    return experiment


def tiles_at_once(engine: AbstractEngine) -> int:
    """Return the number of tiles that share the memory limit."""
    return engine.workers if engine.is_local else 1


def default_path(kernel: AbstractKernel, folder: Path = KERNELS_FOLDER) -> Path:
    """Return the default path of a kernel file. Its name contains the model, the kind
    of the kernel, and the kernel's digest."""
    model = kernel.experiment.model.option
    return folder / f"{model}-{kernel.spec['kind']}-{kernel.identity[:12]}.zarr"


def fill_file(
    kernel: AbstractKernel,
    out: Path | None,
    engine: AbstractEngine,
    options: FillOptions,
    common: CommonOptions,
) -> None:
    """Compute a kernel file and print a summary. With --dry-run,
    print a time estimate instead."""
    path = (out or default_path(kernel)).expanduser()
    filling = Filling(kernel, path, engine, options.workers, options.force)
    if options.dry_run:
        filling.print_estimate(as_json=common.as_json)
        return
    matrix = filling.fill(common.trusted, quiet=common.quiet)
    kernels = matrix.layout.kernels
    tiling = matrix.layout.tiling
    if common.as_json:
        facts: dict[str, Json] = {
            "kernels": kernels,
            "points": tiling.points,
            "train": tiling.train,
            "description": matrix.description,
        }
        write_json({"file": str(matrix.path), **facts})
    elif not common.quiet:
        names = " and ".join(name.upper() for name in kernels)
        sys.stdout.write(
            f"{names} between {tiling.points} points and {tiling.train} training examples\n"
            f"{matrix.path}\n"
        )


@dataclass(frozen=True)
class Filling:
    """The computation of a kernel file by an engine."""

    kernel: AbstractKernel
    path: Path
    engine: AbstractEngine
    workers: int | None  # number of workers by the option --workers
    force: bool

    @cached_property
    def estimate(self) -> RemainingWork:
        """The remaining work and its estimated time."""
        from ntkexp.kernel_file.fill import estimate

        return estimate(self.kernel, self.path, self.force)

    @property
    def in_process(self) -> bool:
        """True if this process computes the tiles, without worker processes.

        With a local engine, this is the case if threads of one process may compute the
        tiles (`concurrent`). Without --workers, it is also the case on a GPU, which one
        process keeps busy, and if there is little work."""
        from ntkexp.kernel_file.fill import LITTLE_WORK_SECONDS

        if not self.engine.is_local or self.kernel.concurrent:
            return self.engine.is_local
        is_little_work = (
            self.engine.workers == 1 or self.estimate.seconds < LITTLE_WORK_SECONDS
        )
        return self.workers in {None, 1} and (
            is_little_work or self.kernel.experiment.device != "cpu"
        )

    @property
    def concurrent_tiles(self) -> int:
        """The number of tiles that are computed concurrently."""
        if self.in_process and not self.kernel.concurrent:
            return 1
        return self.engine.workers

    def print_estimate(self, *, as_json: bool) -> None:
        """Print the estimate. Raise if a job would exceed the time limit
        of the engine."""
        workers = self.concurrent_tiles
        if as_json:
            facts = {
                "file": str(self.path),
                **asdict(self.estimate),
                "workers": workers,
                "elapsed": self.estimate.elapsed(workers),
            }
            write_json(facts)
        else:
            sys.stdout.write(f"{self.path}: {self.estimate.sentence(workers)}\n")
        if not self.in_process:
            self.engine.refuse_longer(self.estimate.seconds_per_tile)

    def fill(self, trust: Sequence[str], *, quiet: bool) -> KernelMatrix:
        """Compute the missing tiles of the kernel file. Return the finished kernel."""
        from ntkexp.kernel_file.fill import fill

        progress = progress_listener(quiet, AGAIN)
        with (
            sigterm_as_interrupt(),
            interruptible(lambda: f"; the same command continues with {self.path}"),
        ):
            return fill(
                self.kernel,
                self.path,
                None if self.in_process else self.engine,
                trust=trusted(trust),
                seconds=self.estimate.seconds_per_tile,
                force=self.force,
                progress=progress,
            )


def limit(
    overrides: Overrides = None,
    out: KernelFile = None,
    *,
    options: FillOptions,
    common: CommonOptions,
) -> None:
    """Compute the NNGP and the NTK of infinite width."""
    from ntkexp.engine.base import choose

    engine = choose(options.engine, options.workers)
    experiment = compose_for_tiles(overrides, common)
    from ntkexp.kernel_file.kernel import InfiniteKernel

    kernel = InfiniteKernel(experiment, experiment.draw(), tiles_at_once(engine))
    fill_file(kernel, out, engine, options, common)


class WeightsAt(StrEnum):
    """The weights of a run that the kernel uses: before or after training."""

    start = "start"
    end = "end"


def tangent(
    overrides: Overrides = None,
    out: KernelFile = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="The seeds of the networks to average over, such as 0..9.",
        ),
    ] = None,
    outputs: Annotated[
        str,
        typer.Option(
            metavar="all|trace|0,3",
            help="The outputs of the kernel: all, some by number, or the trace over outputs.",
        ),
    ] = "all",
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take the network of this run instead."),
    ] = None,
    weights_at: Annotated[
        WeightsAt,
        typer.Option(
            "--at",
            metavar="|".join(WeightsAt),
            help="Take the weights of the run before training (start) or after it (end).",
        ),
    ] = WeightsAt.end,
    *,
    options: FillOptions,
    common: CommonOptions,
) -> None:
    """Compute the tangent kernel of a network.

    Take the network at initialization or, with --run, the network of a finished run.
    """
    conflicting = " ".join(overrides or []) or "--seeds" * (seeds is not None)
    if run is not None and conflicting:
        raise Mistake(
            f"--run={run} determines the network and the data; leave out {conflicting}"
        )
    if run is not None and not (run.expanduser() / "config.json").is_file():
        raise Mistake(f"--run={run} is not a run folder: it has no config.json")
    from ntkexp.engine.base import choose

    engine = choose(options.engine, options.workers)
    seed_list: tuple[int, ...] = ()
    if run is None:
        experiment = compose_for_tiles(overrides, common)
        from ntkexp.sweep.definition import read_values, whole_numbers

        seed_list = (experiment.seed,)
        if seeds is not None:
            seed_list = tuple(whole_numbers(read_values("--seeds", seeds)))
        weights = ""
    else:
        experiment, weights = finished_experiment(run, common)
    from ntkexp.kernel_file.kernel import EmpiricalKernel

    chosen_outputs = read_outputs(outputs)
    kernel = EmpiricalKernel(
        experiment,
        experiment.draw(),
        tiles_at_once(engine),
        seed_list,
        chosen_outputs,
        weights,
        weights_at.value,
    )
    fill_file(kernel, out, engine, options, common)


def finished_experiment(run: Path, common: CommonOptions) -> tuple[Experiment, str]:
    """Return the experiment of a finished run, and the path of its weights."""
    from ntkexp.config.build import admit
    from ntkexp.records.folder import RunFolder
    from ntkexp.run.environment import fix_circumstances
    from ntkexp.run.execute import rebuild_experiment

    folder = RunFolder(run.expanduser())
    if folder.state in {"running", "interrupted", "dead"}:
        raise Mistake(f"--run={run} is not finished; `ntkexp resume` continues it")
    folder.check("weights.pt")
    experiment = rebuild_experiment(folder, admit(common.trusted))
    fix_circumstances(experiment, experiment.threads or 1)
    return experiment, str((folder.path / "weights.pt").absolute())


def read_outputs(outputs: str) -> ChosenOutputs:
    """Parse `--outputs`: all, trace, or a list of indices."""
    match outputs:
        case "all":
            return "all"
        case "trace":
            return "trace"
    try:
        return [int(number) for number in outputs.split(",")]
    except ValueError:
        raise Mistake(
            f"--outputs={outputs}: it takes all, trace, or numbers of outputs, such as 0,3"
        ) from None
