"""An existing Dask cluster: `dask:ADDRESS` or `dask:scheduler.json`, optionally
followed by `,timeout=SECONDS`.

If a worker dies, Dask repeats its task, and the job continues from its folder. Each
task runs in a separate process, so that the Dask worker stays responsive."""

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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import distributed
from distributed.core import connect
from distributed.security import Security

from ntkexp.engine.base import (
    SAFE_PATH,
    SAVE_SECONDS,
    AbstractEngine,
    AbstractWorkers,
    Ended,
    ReportEvent,
    Task,
    WrongEngine,
    blocked,
)
from ntkexp.engine.child import to_line
from ntkexp.mistake import first_line

CONNECT_SECONDS = 10.0  # default timeout for the connection to a scheduler
SPELLING = "write dask:tcp://HOST:8786 or dask:scheduler.json, optionally with ,timeout=SECONDS at the end"

children: defaultdict[str, list[subprocess.Popen[str]]] = defaultdict(list)
"""On a worker: the child processes of each command, by the token of the command."""


@dataclass(frozen=True)
class Dask(AbstractEngine):
    """A Dask cluster. Each thread of the cluster runs at most one job at a time."""

    client: Any  # distributed.Client, which has no types
    workers: int

    def open(self, report_event: ReportEvent) -> DaskWorkers:
        return DaskWorkers(self.client)


class DaskWorkers(AbstractWorkers):
    """A wrapper of Dask's executor that runs every task in a separate process."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.inner = client.get_executor(pure=False)
        self.token = uuid4().hex  # identifies this command's processes on the workers
        self.futures: set[Future[Ended]] = set()

    def submit(self, task: Task) -> Future[Ended]:
        key = f"{task.name}-{uuid4().hex[:8]}"  # a second attempt needs a new key
        future: Future[Ended] = self.inner.submit(
            carry_out, task.name, pickle.dumps(task), self.token, key=key
        )
        self.futures.add(future)
        future.add_done_callback(self.futures.discard)
        return future

    def shutdown(self) -> None:
        unfinished = bool(self.futures)
        self.inner.shutdown(wait=False)  # cancel the tasks that have not begun
        if unfinished:
            self.client.run(interrupt, self.token)


def open_engine(where: str, workers: int | None) -> Dask:
    """Connect to a cluster. Raise if it does not answer, or has no workers."""
    address, _, rest = where.partition(",")
    key, _, value = rest.partition("=")
    try:
        timeout = float(value) if rest else CONNECT_SECONDS
    except ValueError:
        timeout = 0.0
    if timeout <= 0 or (rest and key != "timeout"):
        raise WrongEngine(f"dask:{where} cannot be read; {SPELLING}")
    client = connect_client(address, timeout)
    threads = sum(client.nthreads().values())
    if not threads:
        client.close()
        raise WrongEngine(
            f"dask:{where}: this cluster has no workers; start one with `dask worker {address}`"
        )
    return Dask(client, min(workers or threads, threads))


def connect_client(address: str, timeout: float) -> Any:
    if not address:
        raise WrongEngine(f"dask names no cluster; {SPELLING}")
    by_file = address.endswith(".json")
    if by_file and not Path(address).is_file():
        raise WrongEngine(
            f"dask:{address}: there is no such file; `dask scheduler --scheduler-file` writes one"
        )
    # all errors are reported in one line
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        scheduler = address
        if by_file:
            scheduler = json.loads(Path(address).read_text(encoding="utf-8"))["address"]
        # use a new thread, because in a notebook an event loop already runs in this
        # thread
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, greet(scheduler, timeout)).result()
        return distributed.Client(scheduler, timeout=timeout, set_as_default=False)
    # MemoryError: the reply of another kind of server may be read as a huge message
    # size
    except (OSError, ValueError, KeyError, MemoryError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise WrongEngine(
            f"dask:{address} does not answer within {timeout:g} s ({reason}); {SPELLING}"
        ) from None


async def greet(address: str, timeout: float) -> None:
    """Connect to a scheduler and disconnect. Raise if there is none.

    Check this before a client is created, because a client without a scheduler would
    log more errors later."""
    line = await connect(
        address, timeout=timeout, **Security().get_connection_args("client")
    )
    line.abort()


def carry_out(name: str, pickled: bytes, token: str) -> Ended:
    """Carry out a task in a new process, with this worker's share of the cores.

    This function runs on a worker.
    """
    tasks_at_once = distributed.get_worker().state.nthreads
    threads = max(1, len(os.sched_getaffinity(0)) // tasks_at_once)
    limits = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        SAFE_PATH: "1",  # also for processes that the child starts
    }
    # the new process unblocks SIGINT when it is ready to report its end
    with blocked(signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ntkexp.engine.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | limits,
            start_new_session=True,
        )
    children[token].append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    # if the process has died, its empty answer is handled below
    with suppress(BrokenPipeError):
        process.stdin.write(to_line(pickled, threads))
        process.stdin.flush()
    answer = process.stdout.read()
    status = process.wait()
    children[token].remove(process)
    process.stdin.close()
    if not answer:
        return Ended(name, "killed", f"its process ended with status {status}")
    return Ended(**json.loads(answer.splitlines()[-1]))


async def interrupt(token: str) -> None:
    """Interrupt the processes of a command, and wait until they end.
    This runs on a worker."""
    for process in children[token]:
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + SAVE_SECONDS
    while (
        any(process.poll() is None for process in children[token])
        and time.monotonic() < end
    ):
        await asyncio.sleep(0.1)
