"""A kernel file that is ordered: what it will take is said, who suits computes it, and what came of it is said."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.advice import AGAIN
from ntkexp.cli.interrupt import interruptible, polite_kill
from ntkexp.cli.repeat import trusted
from ntkexp.report.progress import listener

if TYPE_CHECKING:
    from ntkexp.cli.kernel.request import FillRequest
    from ntkexp.data.base import Data
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.kernel_file.fill.crew import AbstractCrew
    from ntkexp.kernel_file.fill.estimate import WorkLeft
    from ntkexp.kernel_file.fill.filler import AbstractFiller
    from ntkexp.kernel_file.fill.recipe import AbstractRecipe
    from ntkexp.kernel_file.fill.subject import Subject
    from ntkexp.records.json_file import Json
    from ntkexp.records.kernel_file.store import KernelMatrix

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
        from ntkexp.kernel_file.fill.subject import Subject

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
        from ntkexp.kernel_file.fill.estimate import estimate

        apart = self.make_filler()  # what is timed is no part of the file, on which a filler may have a remark
        return estimate(self.path, self.subject, apart, self.asked.force)

    @property
    def in_threads(self) -> bool:
        """Whether this process computes: a device has room for one, and little work is not worth starting others."""
        from ntkexp.kernel_file.fill.estimate import LONG

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
        from ntkexp.kernel_file.fill.conduct import EngineCrew
        from ntkexp.kernel_file.fill.crew import ThreadCrew
        from ntkexp.kernel_file.fill.tile_job import TileJob

        if self.in_threads:
            return ThreadCrew(self.subject, self.filler, self.workers)
        fields, trust = self.experiment.fields(), trusted(self.asked.trust)
        return EngineCrew(
            self.engine, TileJob(str(self.path.absolute()), fields, trust, self.recipe), self.estimate.each
        )

    def fill(self) -> KernelMatrix:
        """Fill the kernel file, and finish it."""
        from ntkexp.kernel_file.fill.estimate import LONG
        from ntkexp.kernel_file.fill.fill import fill

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
    from ntkexp.records.json_file import to_text

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
