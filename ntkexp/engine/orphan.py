"""End a fork server if the command that started it dies while the server is importing
modules.

The fork server (see `local`) starts the processes of tasks. It imports this module
first. Without this module, the server would notice the death of the command only after
the import of torch, seconds later. The check uses a timer signal and not a thread,
because a process with threads must not fork."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

CHECK_SECONDS = 0.1  # interval between checks that the parent process still runs
# the last module that the server imports; after it, the checks end
LAST = "ntkexp.engine.local"

COMMAND = os.getppid()


def leave_with_command(number: int, frame: FrameType | None) -> None:
    """End this process if its parent has died. After the last import,
    stop the timer."""
    if os.getppid() != COMMAND:
        os._exit(1)
    if hasattr(sys.modules.get(LAST), "start_server"):
        signal.setitimer(signal.ITIMER_REAL, 0)


signal.signal(signal.SIGALRM, leave_with_command)
signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)
