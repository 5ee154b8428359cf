"""The first module that a fork server imports: it ends the server if the command dies during the
other imports.

By itself, the server notices the end of its command only after the import of torch, which takes
seconds. A timer signal checks meanwhile, not a thread, because a process with threads must not
fork.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

CHECK_SECONDS = 0.1  # seconds
LAST = "ntkexp.engine.local"  # the last import

COMMAND = os.getppid()


def leave_with_command(number: int, frame: FrameType | None) -> None:
    """End this process if its parent has changed. Stop the timer after the last import."""
    if os.getppid() != COMMAND:
        os._exit(1)
    if hasattr(sys.modules.get(LAST), "start_server"):
        signal.setitimer(signal.ITIMER_REAL, 0)


signal.signal(signal.SIGALRM, leave_with_command)
signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)
