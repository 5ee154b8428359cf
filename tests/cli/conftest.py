"""A command run in this process, as the entry point runs it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pytest

from ntkexp.cli.main import run


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Command: TypeAlias = Callable[..., Ended]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> Ended:
        around = dict(os.environ)
        heard = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        status = run(arguments)
        os.environ.clear()
        os.environ.update(around)
        for number, handler in heard.items():
            signal.signal(number, handler)
        return Ended(status, *capfd.readouterr())

    return call
