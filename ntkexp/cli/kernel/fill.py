"""`ntkexp kernel limit` and `ntkexp kernel tangent`: a kernel is computed into a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.interrupt import interruptible
from ntkexp.cli.progress import listener
from ntkexp.cli.train import limit_threads
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.data.base import Data
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.kernel.read.outputs import Outputs
    from ntkexp.kernel_file.fill.filler import AbstractFiller
    from ntkexp.records.json_file import Json
    from ntkexp.records.kernel_file.store import KernelMatrix


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """What the commands that compute a kernel file have in common."""

    overrides: Sequence[str]
    out: Path | None
    workers: int | None = None
    force: bool = False
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None


def limit(asked: FillRequest) -> None:
    """Compute the kernels of infinite width into a file."""
    tell(asked, compute_limit(asked, Path("outputs") / "kernels"))


def compute_limit(asked: FillRequest, folder: Path) -> KernelMatrix:
    """Compute the file of a kernel of infinite width, in a folder if the file has no name."""
    from ntkexp.engine.local import cores

    experiment = compose_experiment(asked)
    from ntkexp.kernel_file.fill.limit import limit_of

    data = experiment.draw()
    return fill_file(asked, experiment, data, limit_of(experiment, data, asked.workers or cores()), folder)


def tangent(asked: FillRequest, seeds: str | None, outputs: str) -> None:
    """Compute the tangent kernel of networks as they are drawn."""
    experiment = compose_experiment(asked)
    from ntkexp.kernel_file.fill.tangent import at_start
    from ntkexp.sweep.axis_values import values
    from ntkexp.sweep.parse import whole_numbers

    chosen = (experiment.seed,) if seeds is None else whole_numbers(values("--seeds", seeds))
    data = experiment.draw()
    tell(asked, fill_file(asked, experiment, data, at_start(experiment, data, chosen, read_outputs(outputs))))


def tangent_of_run(asked: FillRequest, seeds: str | None, outputs: str, run: Path, when: str) -> None:
    """Compute the tangent kernel of the network of a run."""
    if asked.overrides or seeds is not None:
        surplus = " ".join(asked.overrides) or "--seeds"
        raise Mistake(f"--run={run} says which network and which data; leave out {surplus}")
    folder = run.expanduser()
    if not (folder / "config.json").is_file():
        raise Mistake(f"--run={run} is no run folder: it has no config.json")
    from ntkexp.config.build import build
    from ntkexp.config.target import admit
    from ntkexp.kernel_file.fill.tangent import at_checkpoint
    from ntkexp.records.folder import CONFIG, RunFolder
    from ntkexp.run.environment import fix_circumstances

    written = RunFolder(folder)
    if written.state in {"running", "dead"}:
        raise Mistake(f"--run={run} is not finished; `ntkexp resume` goes on with it")
    written.check(CONFIG, "weights.pt")
    experiment = build(written.read_json(CONFIG), admit(asked.trust))
    fix_circumstances(experiment)
    data = experiment.draw()
    filler = at_checkpoint(experiment, data, folder / "weights.pt", when, read_outputs(outputs))
    tell(asked, fill_file(asked, experiment, data, filler))


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


def compose_experiment(asked: FillRequest) -> Experiment:
    """Compose the experiment whose data and network are meant."""
    limit_threads(asked.overrides)
    from ntkexp.config.compose import compose
    from ntkexp.run.environment import fix_circumstances

    experiment = compose(asked.overrides, asked.config_dir, asked.trust)
    fix_circumstances(experiment)
    return experiment


def fill_file(
    asked: FillRequest,
    experiment: Experiment,
    data: Data,
    filler: AbstractFiller,
    folder: Path = Path("outputs/kernels"),
) -> KernelMatrix:
    """Fill the kernel file, and finish it."""
    from ntkexp.engine.local import cores
    from ntkexp.kernel_file.fill.fill import fill
    from ntkexp.kernel_file.fill.subject import Subject

    subject = Subject(experiment, data, filler.kernel, filler.outputs)
    name = f"{experiment.model.option}-{filler.kernel['kind']}-{subject.identity[:12]}.zarr"
    path = (folder / name if asked.out is None else asked.out).expanduser()
    with interruptible(lambda: f"; the same command goes on with {path}"):
        progress = listener(asked.quiet)
        return fill(path, subject, filler, workers=asked.workers or cores(), force=asked.force, progress=progress)


def tell(asked: FillRequest, matrix: KernelMatrix) -> None:
    """Say what is in the file, and where it is."""
    from ntkexp.records.json_file import to_text

    layout = matrix.layout
    if asked.as_json:
        told: Json = {
            "file": str(matrix.path),
            "kernels": layout.kernels,
            "points": layout.tiling.points,
            "train": layout.tiling.train,
            "description": matrix.description,
        }
        sys.stdout.write(to_text(told))
    elif not asked.quiet:
        kernels = " and ".join(name.upper() for name in layout.kernels)
        sys.stdout.write(
            f"{kernels} of {layout.tiling.points} points with {layout.tiling.train} of them\n{matrix.path}\n"
        )
