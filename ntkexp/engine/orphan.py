"""The first module that a fork server loads: it ends the server if the command dies while the others are loaded.

The server looks for the end of its command only when it has loaded torch, which takes seconds. A thread may not look:
a process with threads must not fork.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERVAL = 0.1  # seconds
LAST = "ntkexp.engine.local"  # of the modules that are loaded

COMMAND = os.getppid()


def leave_with_command(number: int, frame: FrameType | None) -> None:
    """End this process if it has another parent than before. Stop looking when everything is loaded."""
    if os.getppid() != COMMAND:
        os._exit(1)
    if hasattr(sys.modules.get(LAST), "start_server"):
        signal.setitimer(signal.ITIMER_REAL, 0)


signal.signal(signal.SIGALRM, leave_with_command)
signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
