"""`ntkexp kernel limit` and `tangent`: which kernel is to be computed into a file, what it will take, and what came
of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.surroundings import AGAIN, interruptible, polite_kill, trusted
from ntkexp.cli.train import limit_threads
from ntkexp.mistake import Mistake
from ntkexp.report.progress import listener

if TYPE_CHECKING:
    from ntkexp.data.base import Data
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.kernel.read.outputs import Outputs
    from ntkexp.kernel_file.fill import AbstractCrew
    from ntkexp.kernel_file.filler import AbstractFiller, AbstractRecipe
    from ntkexp.kernel_file.tile import Subject, WorkLeft
    from ntkexp.records.atomic import Json
    from ntkexp.records.kernel_file import KernelMatrix


# --- What the commands that compute kernel files have in common, by the names of their options.


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """Which data and network are meant, where the file lies, and who computes it."""

    overrides: Sequence[str]
    out: Path | None
    workers: int | None
    engine: str
    dry_run: bool = False
    force: bool = False
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None

    def choose_engine(self) -> AbstractEngine:
        """Open the engine: one that cannot be had is refused before anything is computed."""
        from ntkexp.engine.base import choose

        return choose(self.engine, self.workers)

    def compose(self) -> Experiment:
        """Compose the experiment whose data and network are meant; tiles have one thread if it does not say more."""
        limit_threads(self.overrides)
        from ntkexp.config.compose import compose
        from ntkexp.run.environment import fix_circumstances

        experiment = compose(self.overrides, self.config_dir, self.trust)
        fix_circumstances(experiment, experiment.threads or 1)
        return experiment


# --- A kernel file that is ordered: what it will take is said, who suits computes it, and what came of it is said.


FOLDER = Path("outputs") / "kernels"
"""Where kernel files lie that were given no name."""


@dataclass(frozen=True)
class Order:
    """The kernel that a recipe makes for an experiment, by an engine; `folder` is for a file without a name."""

    asked: FillRequest
    engine: AbstractEngine
    experiment: Experiment
    recipe: AbstractRecipe
    folder: Path = FOLDER

    @cached_property
    def data(self) -> Data:
        """The points."""
        return self.experiment.draw()

    @cached_property
    def filler(self) -> AbstractFiller:
        """Whoever computes a tile in this process, or says what others will compute."""
        return self.make_filler()

    def make_filler(self) -> AbstractFiller:
        """Make one anew."""
        return self.recipe.filler(self.experiment, self.data, self.engine.workers if self.engine.near else 1)

    @cached_property
    def subject(self) -> Subject:
        """What the file is of."""
        from ntkexp.kernel_file.tile import Subject

        return Subject(self.experiment, self.data, self.filler.kernel, self.filler.outputs)

    @property
    def path(self) -> Path:
        """The place of the file."""
        kind, digits = self.filler.kernel["kind"], self.subject.identity[:12]
        name = f"{self.experiment.model.option}-{kind}-{digits}.zarr"
        return (self.folder / name if self.asked.out is None else self.asked.out).expanduser()

    @cached_property
    def estimate(self) -> WorkLeft:
        """What is left to do, and what it takes."""
        from ntkexp.kernel_file.tile import estimate

        apart = self.make_filler()  # what is timed is no part of the file, on which a filler may have a remark
        return estimate(self.path, self.subject, apart, self.asked.force)

    @property
    def in_threads(self) -> bool:
        """Whether this process computes: a device has room for one, and little work is not worth starting others."""
        from ntkexp.kernel_file.tile import LONG

        little = self.engine.workers == 1 or self.estimate.seconds < LONG or self.experiment.device != "cpu"
        unasked = self.asked.workers in {None, 1}
        return self.engine.near and (self.filler.concurrent or (unasked and little))

    @property
    def workers(self) -> int:
        """How many tiles are computed at once."""
        return 1 if self.in_threads and not self.filler.concurrent else self.engine.workers

    @property
    def crew(self) -> AbstractCrew:
        """Who computes the tiles."""
        from ntkexp.kernel_file.fill import EngineCrew, ThreadCrew, TileJob

        if self.in_threads:
            return ThreadCrew(self.subject, self.filler, self.workers)
        fields, trust = self.experiment.fields(), trusted(self.asked.trust)
        return EngineCrew(
            self.engine, TileJob(str(self.path.absolute()), fields, trust, self.recipe), self.estimate.each
        )

    def fill(self) -> KernelMatrix:
        """Fill the kernel file, and finish it."""
        from ntkexp.kernel_file.fill import fill
        from ntkexp.kernel_file.tile import LONG

        progress, force = listener(self.asked.quiet, AGAIN), self.asked.force
        if self.estimate.seconds >= LONG:
            progress.say(f"{self.path.name}: {self.estimate.sentence(self.workers)}")
        with polite_kill(), interruptible(lambda: f"; the same command goes on with {self.path}"):
            return fill(self.path, self.subject, self.filler, self.crew, force=force, progress=progress)


def carry_out(order: Order) -> None:
    """Fill the file and say what is in it, or only say what that would take."""
    if order.asked.dry_run:
        show_estimate(order)
    else:
        tell(order.asked, order.fill())


def show_estimate(order: Order) -> None:
    """Say what it would take."""
    from ntkexp.records.atomic import to_text

    ahead, workers = order.estimate, order.workers
    if order.asked.as_json:
        told: Json = {"file": str(order.path), **asdict(ahead), "workers": workers, "elapsed": ahead.elapsed(workers)}
        sys.stdout.write(to_text(told))
    else:
        sys.stdout.write(f"{order.path}: {ahead.sentence(workers)}\n")
    if not order.in_threads:
        order.engine.refuse_longer(ahead.each)


def tell(asked: FillRequest, matrix: KernelMatrix) -> None:
    """Say what is in the file, and where it is."""
    from ntkexp.records.atomic import to_text

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


# --- `ntkexp kernel limit` and `ntkexp kernel tangent`: which kernel is to be computed into a file, and of what.


def limit(asked: FillRequest) -> None:
    """Compute the kernels of infinite width into a file."""
    carry_out(order_limit(asked, asked.choose_engine(), FOLDER))


def order_limit(asked: FillRequest, engine: AbstractEngine, folder: Path) -> Order:
    """Order the kernels of infinite width, in a folder if the file has no name."""
    experiment = asked.compose()
    from ntkexp.kernel_file.filler import LimitRecipe

    return Order(asked, engine, experiment, LimitRecipe(), folder)


def tangent(asked: FillRequest, seeds: str | None, outputs: str) -> None:
    """Compute the tangent kernel of networks as they are drawn."""
    engine = asked.choose_engine()
    experiment = asked.compose()
    from ntkexp.kernel_file.filler import StartRecipe
    from ntkexp.sweep.definition import values, whole_numbers

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
    from ntkexp.config.build import admit
    from ntkexp.kernel_file.filler import CheckpointRecipe
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
