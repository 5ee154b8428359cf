"""Another program waits beside us: each line that it is told makes it do its act once, and answer by a line of JSON.

    a number      the seconds that it took
    "a reason"    why there are none

One that does not answer in time is stopped, and is started again when it is asked for something else.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import Self

from tests.bench.peers import KNOWS_US, environment, module
from tests.bench.race import DIED, Race, line


@dataclass
class Waiting:
    """`tests/bench/PROGRAM_QUESTION.py`; it has so many seconds for an answer."""

    race: Race
    program: str
    question: str
    seconds: float
    threads: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, word: str) -> float | str:
        """The seconds that its act takes, or why there are none."""
        process = self.process = self.process or self.started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(word.encode() + b"\n")
        told = line(process.stdout, self.seconds)
        if told in (None, DIED):
            self.stop()
        return f"> {self.seconds:g} s" if told is None else told

    def started(self) -> subprocess.Popen[bytes]:
        """The program, as it begins to wait."""
        python = environment(self.race.folder, self.program)
        return subprocess.Popen(
            [python, "-m", module(self.program, self.question), str(self.threads)],
            env=KNOWS_US,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def stop(self) -> None:
        """Stop it, if it was started."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
