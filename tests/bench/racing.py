"""What programs in a race say, in an environment that has nothing of ours: `tests.bench.peers` reads it."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MEMORY = 8_000_000_000  # bytes: Jacobians of ten outputs would take 40 GB, and a machine that swaps measures nothing


def tell(word: float | str) -> None:
    """A line of JSON, at once."""
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def race(asked: dict[str, Any], act_of: Callable[..., Callable[[], object]]) -> None:
    """Call each kernel once and then so many times, or until its time is over; tell each call, and the end."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    tell("ready")
    for kernel in asked["kernels"]:
        try:
            act, spent = act_of(*kernel), 0.0
            tell(seconds(act))
            for _ in range(asked["times"]):
                tell(took := seconds(act))
                spent += took
                if spent > asked["seconds"]:
                    break
            tell("ended")
        except Exception as error:  # whatever it is, the others go on
            tell("too large" if "memory" in str(error) else type(error).__name__)


def seconds(act: Callable[[], object]) -> float:
    """How long it takes once."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
