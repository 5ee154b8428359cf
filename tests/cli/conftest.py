"""Commands in this process, as from the entry point, and a finished run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from ntkexp.cli.main import run
from ntkexp.mistake import HIDDEN
from tests.report.synthetic import digits, write_run


class Ended(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


Command: TypeAlias = Callable[..., Ended]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> Ended:
        environment = dict(os.environ)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        status = run(arguments)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return Ended(status, *capfd.readouterr())

    return call


@pytest.fixture
def _forgetful() -> Iterator[None]:
    """Delete the secrets of a test, because later messages would hide them too."""
    before = dict(HIDDEN)
    yield
    HIDDEN.clear()
    HIDDEN.update(before)


def check(ended: tuple[int, str, str], *advice: str, status: int = 2) -> None:
    """Assert that a command printed one line of advice on stderr, and nothing else."""
    assert (ended[0], ended[1], ended[2].count("\n")) == (status, "", 1), ended
    assert ended[2].startswith("ntkexp: ")
    for words in advice:
        assert words in ended[2], ended[2]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("outputs") / "runs" / "mlp-w512-s0-000000000000", digits())
