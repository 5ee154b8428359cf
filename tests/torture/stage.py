"""Where a case is played: a folder of its own, the commands that are run in it, and what all cases of a kind share."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.command import WALL, Command, ended, ntkexp, started
from tests.torture.judge import Ended, Fault, Outcome, judged

SMALL = (
    *("data.train=12", "data.probe=6", "data.test=6", "model.width=8", "threads=1"),
    *("steps=3", "path.count=3", "path.error_samples=2"),
)


@dataclass(frozen=True)
class Stage:
    """A folder for one case, and one that outlives it."""

    folder: Path
    shared: Path

    def run(self, *arguments: str, command: Command = ntkexp) -> Ended:
        """A command, to its end."""
        return ended(started(arguments, self.folder, command), arguments, self.folder, WALL)

    def killed(self, arguments: Sequence[str], after: float, command: Command = ntkexp) -> Ended:
        """A command that is killed after so many seconds, unless it has come to its end."""
        return ended(started(arguments, self.folder, command), arguments, self.folder, after)

    def outcome(self, *arguments: str) -> Outcome:
        """What became of a command."""
        return judged(self.run(*arguments))

    def done(self, *arguments: str) -> Ended:
        """A command that has no reason to refuse."""
        found = self.run(*arguments)
        if judged(found) != "done":
            raise Fault(str(found))
        return found

    def kept(self, name: str, make: Callable[[Stage], object]) -> Path:
        """A folder that is made once, whoever asks first."""
        place = self.shared / name
        with (self.shared / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                made = self.shared / f"{name}.begun"
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                make(Stage(made, self.shared))
                made.rename(place)
        return place

    def copy(self, place: Path, name: str) -> Path:
        """What is shared, for this case alone."""
        return Path(shutil.copytree(place, self.folder / name, symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def cleared(folder: Path) -> None:
    """Remove a folder, whatever was done to its permissions."""
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
