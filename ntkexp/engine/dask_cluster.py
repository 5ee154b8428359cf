"""An existing Dask cluster: `dask:ADDRESS` or `dask:scheduler.json`, and `,timeout=SECONDS`.

Dask carries a task out again when its worker dies. That does no harm: a job goes on from what lies in its folder. Each
is a process of its own beside the Dask worker, which stays free to answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import distributed
from distributed.core import connect
from distributed.security import Security

from ntkexp.engine.base import AbstractElsewhere, Began, Ended, Event, Task, WrongEngine
from ntkexp.engine.child import to_line
from ntkexp.mistake import first_line

TIMEOUT, GRACE = 10.0, 30.0
SPELLING = "write dask:tcp://HOST:8786 or dask:scheduler.json, and ,timeout=SECONDS if 10 are not right"

children: defaultdict[str, list[subprocess.Popen[str]]] = defaultdict(list)
"""On a worker: the processes of each command, so that they can be interrupted."""


@dataclass(frozen=True)
class Dask(AbstractElsewhere):
    """A cluster does as many jobs at once as it has threads, or fewer."""

    client: Any  # distributed.Client, which states no types
    count: int
    token: str = field(default_factory=lambda: uuid4().hex)

    def refuse_longer(self, seconds: float) -> None:
        pass  # nobody ends a worker

    def perform(self, tasks: Iterator[Task]) -> Generator[Event]:
        at_work: dict[Any, str] = {}
        try:
            while True:
                while len(at_work) < self.count and (task := next(tasks, None)) is not None:
                    key = f"{task.name}-{uuid4().hex[:8]}"  # what is tried again is another task
                    at_work[
                        self.client.submit(carry_out, task.name, pickle.dumps(task), self.token, key=key, pure=False)
                    ] = task.name
                    yield Began(task.name)
                if not at_work:
                    return
                with self.client.as_current():
                    ready = distributed.wait(list(at_work), return_when="FIRST_COMPLETED").done
                for future in ready:
                    yield ending_of(at_work.pop(future), future)
        finally:
            self.dismiss(list(at_work))

    def dismiss(self, futures: list[Any]) -> None:
        """Take back what has not begun, and ask the others to stop."""
        if futures:
            self.client.cancel(futures)
            self.client.run(interrupt, self.token)


def open_engine(where: str, workers: int | None) -> Dask:
    """Find the cluster, if it answers in time."""
    address, _, rest = where.partition(",")
    timeout = read_timeout(where, rest)
    client = connect_client(address, timeout)
    threads = sum(client.nthreads().values())
    if not threads:
        client.close()
        raise WrongEngine(f"dask:{where}: this cluster has no workers; start one with `dask worker {address}`")
    return Dask(client, min(workers or threads, threads))


def read_timeout(where: str, rest: str) -> float:
    """Read the limit of time that was given."""
    key, _, value = rest.partition("=")
    try:
        seconds = float(value) if rest else TIMEOUT
    except ValueError:
        seconds = 0.0
    if seconds <= 0 or (rest and key != "timeout"):
        raise WrongEngine(f"dask:{where} cannot be read; {SPELLING}")
    return seconds


def connect_client(address: str, timeout: float) -> Any:
    """Connect a client to the cluster."""
    if not address:
        raise WrongEngine(f"dask names no cluster; {SPELLING}")
    by_file = address.endswith(".json")
    if by_file and not Path(address).is_file():
        raise WrongEngine(f"dask:{address}: there is no such file; `dask scheduler --scheduler-file` writes one")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong is said in one line
    try:
        scheduler = json.loads(Path(address).read_text(encoding="utf-8"))["address"] if by_file else address
        with ThreadPoolExecutor(1) as apart:  # a notebook's thread has a loop running already
            apart.submit(asyncio.run, greet(scheduler, timeout)).result()
        return distributed.Client(scheduler, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, KeyError, MemoryError) as error:  # MemoryError: what other servers say is a huge size
        said = f"{type(error).__name__}: {first_line(error)}"
        raise WrongEngine(f"dask:{address} does not answer within {timeout:g} s ({said}); {SPELLING}") from None


async def greet(address: str, timeout: float) -> None:
    """See whether a scheduler is there: a client that does not find one complains once more when it is forgotten."""
    line = await connect(address, timeout=timeout, **Security().get_connection_args("client"))
    line.abort()


def carry_out(name: str, pickled: bytes, token: str) -> dict[str, str]:
    """Carry out a task on a worker, in a process of its own; how it ended is given back."""
    threads = max(1, len(os.sched_getaffinity(0)) // distributed.get_worker().state.nthreads)
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ntkexp.engine.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | limits,
        start_new_session=True,
    )
    children[token].append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it died: its last word is missing
        process.stdin.write(to_line(pickled, threads))
        process.stdin.flush()
    said = process.stdout.read()
    status = process.wait()
    children[token].remove(process)
    process.stdin.close()
    killed = {"name": name, "how": "killed", "reason": f"its process ended with status {status}"}
    found: dict[str, str] = json.loads(said.splitlines()[-1]) if said else killed
    return found


async def interrupt(token: str) -> None:
    """On a worker: ask the processes of a command to stop, and wait for them."""
    for process in children[token]:
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + GRACE
    while any(process.poll() is None for process in children[token]) and time.monotonic() < end:
        await asyncio.sleep(0.1)


def ending_of(name: str, future: Any) -> Ended:
    """Say what became of a task; one whose workers died too often is given up by Dask."""
    error = future.exception()
    if error is not None:
        return Ended(name, "killed", f"the cluster lost it: {type(error).__name__}: {first_line(error)}")
    return Ended(**future.result())
