"""A kernel file as a command asks for it: what it will take is said, whoever suits computes it, and what came of it is
said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.options import limit_threads
from ntkexp.cli.surroundings import AGAIN, interruptible, polite_kill, trusted
from ntkexp.report.progress import listener

if TYPE_CHECKING:
    from ntkexp.engine.base import AbstractEngine
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.kernel_file.fill import WorkLeft
    from ntkexp.kernel_file.kernel import AbstractKernel
    from ntkexp.records.atomic import Json
    from ntkexp.records.kernel_file import KernelMatrix

FOLDER = Path("outputs") / "kernels"
"""Where kernel files lie that were given no name."""


def compose_for_tiles(overrides: Sequence[str], config_dir: Path | None, trust: Sequence[str]) -> Experiment:
    """Compose the experiment whose data and network are meant; tiles have one thread if it does not say more."""
    limit_threads(overrides)
    from ntkexp.config.compose import compose
    from ntkexp.run.environment import fix_circumstances

    experiment = compose(overrides, config_dir, trust)
    fix_circumstances(experiment, experiment.threads or 1)
    return experiment


def tiles_at_once(engine: AbstractEngine) -> int:
    """How many tiles one process computes at once, and shares its memory among."""
    return engine.workers if engine.near else 1


def default_path(kernel: AbstractKernel, folder: Path = FOLDER) -> Path:
    """The place of a file that was given no name."""
    return folder / f"{kernel.experiment.model.option}-{kernel.spec['kind']}-{kernel.identity[:12]}.zarr"


@dataclass(frozen=True)
class Filling:
    """The filling of a kernel file that is to be estimated, or carried out, on an engine."""

    kernel: AbstractKernel
    path: Path
    engine: AbstractEngine
    workers: int | None  # as they were asked for
    force: bool

    @cached_property
    def estimate(self) -> WorkLeft:
        """What is left to do, and what it takes."""
        from ntkexp.kernel_file.fill import estimate

        return estimate(self.kernel, self.path, self.force)

    @property
    def here(self) -> bool:
        """Whether this process computes: a device has room for one, and little work is not worth starting others."""
        from ntkexp.kernel_file.fill import LONG

        if not self.engine.near or self.kernel.concurrent:
            return self.engine.near
        little = self.engine.workers == 1 or self.estimate.seconds < LONG
        return self.workers in {None, 1} and (little or self.kernel.experiment.device != "cpu")

    @property
    def at_once(self) -> int:
        """How many tiles are computed at once."""
        return 1 if self.here and not self.kernel.concurrent else self.engine.workers

    def show(self, *, as_json: bool) -> None:
        """Say what it would take."""
        from ntkexp.records.atomic import to_text

        ahead, workers = self.estimate, self.at_once
        if as_json:
            elapsed = ahead.elapsed(workers)
            sys.stdout.write(to_text({"file": str(self.path), **asdict(ahead), "workers": workers, "elapsed": elapsed}))
        else:
            sys.stdout.write(f"{self.path}: {ahead.sentence(workers)}\n")
        if not self.here:
            self.engine.refuse_longer(ahead.each)

    def carry_out(self, trust: Sequence[str], *, quiet: bool) -> KernelMatrix:
        """Fill the kernel file, and finish it."""
        from ntkexp.kernel_file.fill import LONG, fill

        progress = listener(quiet, AGAIN)
        if self.estimate.seconds >= LONG:
            progress.say(f"{self.path.name}: {self.estimate.sentence(self.at_once)}")
        with polite_kill(), interruptible(lambda: f"; the same command goes on with {self.path}"):
            return fill(
                self.kernel,
                self.path,
                None if self.here else self.engine,
                trust=trusted(trust),
                seconds=self.estimate.each,
                force=self.force,
                progress=progress,
            )


def show_matrix(matrix: KernelMatrix, *, quiet: bool, as_json: bool) -> None:
    """Say what is in the file, and where it is."""
    from ntkexp.records.atomic import to_text

    layout = matrix.layout
    if as_json:
        told: Json = {
            "file": str(matrix.path),
            "kernels": layout.kernels,
            "points": layout.tiling.points,
            "train": layout.tiling.train,
            "description": matrix.description,
        }
        sys.stdout.write(to_text(told))
    elif not quiet:
        kernels = " and ".join(name.upper() for name in layout.kernels)
        sys.stdout.write(
            f"{kernels} of {layout.tiling.points} points with {layout.tiling.train} of them\n{matrix.path}\n"
        )
