"""Some tiles of a kernel file as a job: a worker opens the file, computes them and writes each, sealed, as it is ready.

Tiles that are marked already are passed over, so a job that is done again goes on where it was lost. Threads of linear
algebra are as many as the experiment says, or one: bits do not depend on who computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkexp.config.build import build
from ntkexp.config.target import admit
from ntkexp.engine.base import AbstractJob, Ending, Stepped, Tell
from ntkexp.kernel_file.fill.crew import ThreadCrew, Tile
from ntkexp.kernel_file.fill.recipe import AbstractRecipe
from ntkexp.kernel_file.fill.subject import Subject
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.kernel_file.store import KernelMatrix, open_matrix
from ntkexp.run.environment import fix_circumstances


@dataclass(frozen=True)
class TileJob(AbstractJob):
    """Tiles of a file that exists."""

    file: str
    fields: dict[str, Any]
    """The experiment whose data and network are meant."""

    trust: tuple[str, ...]
    recipe: AbstractRecipe
    tiles: tuple[Tile, ...] = ()

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        with saying_where_to_look():
            matrix, crew = self.matrix, self.crew(threads)
            if matrix.facts["identity"] != crew.subject.identity:
                raise Mistake(f"{self.file} is of something else there: that worker has other data or another version")
            left = matrix.unmarked(self.tiles)
            for count in crew.complete(matrix, left, Silent()):
                tell(Stepped(name, count, len(left)))
        return "done" if left else "found"

    @property
    def matrix(self) -> KernelMatrix:
        """The file, which was begun where the command was given."""
        if not Path(self.file).exists():
            raise Mistake(f"a worker does not see {self.file}; choose a place on a file system that all machines share")
        return open_matrix(Path(self.file))

    def crew(self, threads: int) -> ThreadCrew:
        """Draw data and network here as they were drawn where the command was given."""
        experiment = build(self.fields, admit(self.trust))
        fix_circumstances(experiment, experiment.threads or 1)
        data = experiment.draw()
        filler = self.recipe.filler(experiment, data, threads)
        return ThreadCrew(Subject(experiment, data, filler.kernel, filler.outputs), filler, threads)


@contextmanager
def saying_where_to_look() -> Iterator[None]:
    """Let an exception that nobody expected say how to see where it comes from."""
    try:
        yield
    except Exception as error:
        error.add_note("computed by a single worker on this machine, it says where")
        raise
