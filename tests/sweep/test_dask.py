"""A real Dask cluster, with workers in another folder than the client's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from ntkexp.cli.main import run
from tests.sweep.cluster import Cluster, dask_cluster
from tests.sweep.commands import TINY, begun, ended, journal, record, states, swept

FOUR = ("model.width=8,9", "seed=0..1", *TINY)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with dask_cluster(tmp_path) as found:
        yield found


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing(tmp_path: Path, cluster: Cluster) -> None:
    process = begun(tmp_path / "out", *FOUR, "steps=500", cluster.engine)
    while process.poll() is None and not list(tmp_path.glob("out/runs/*/progress.json")):
        time.sleep(0.01)
    os.killpg(cluster.workers[0].pid, signal.SIGKILL)
    found = ended(process)
    assert found.status == 0, found
    assert states(tmp_path / "out") == ["done"] * 4
    assert sorted(journal(tmp_path / "out", "done")) == sorted(
        run["folder"] for run in record(tmp_path / "out")["runs"]
    )


@pytest.mark.slow
def test_an_interrupt_reaches_the_workers(tmp_path: Path, cluster: Cluster) -> None:
    process = begun(tmp_path / "out", *FOUR, "steps=100000", "checkpoint_seconds=1000", cluster.engine)
    while process.poll() is None and len(list(tmp_path.glob("out/runs/*/progress.json"))) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    found = ended(process)
    assert found.status == 130, found
    assert len(list(tmp_path.glob("out/runs/*/checkpoint.pt"))) == 2


def test_an_address_that_does_not_answer_is_one_line_in_time(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens
        engine = f"--engine=dask:tcp://127.0.0.1:{silent.getsockname()[1]},timeout=0.5"
        assert run(["sweep", *FOUR, engine, f"--out={tmp_path}"]) == 2
    said = capfd.readouterr().err
    assert "does not answer within 0.5 s" in said
    assert said.count("\n") == 1


async def swept_in_a_notebook(*arguments: str) -> int:
    return run(["sweep", *arguments])


def test_a_loop_that_runs_already_is_not_in_the_way(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        engine = f"--engine=dask:tcp://127.0.0.1:{silent.getsockname()[1]},timeout=0.5"
        assert asyncio.run(swept_in_a_notebook(*FOUR, engine, f"--out={tmp_path}")) == 2
    assert "does not answer within 0.5 s" in capfd.readouterr().err


def test_a_server_of_another_kind_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        Thread(target=speak_otherwise, args=(server,), daemon=True).start()
        found = swept(tmp_path, *FOUR, f"--engine=dask:tcp://127.0.0.1:{server.getsockname()[1]},timeout=3")
    assert (found.status, found.err.count("\n")) == (2, 1), found.err
    assert "does not answer within 3 s" in found.err


def speak_otherwise(server: socket.socket) -> None:
    """As a web server does."""
    line, _ = server.accept()
    with line:
        line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        while line.recv(4096):
            pass


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("dask", "names no cluster"),
        ("dask:nowhere.json", "there is no such file"),
        ("dask:tcp://127.0.0.1:1,timout=3", "cannot be read"),
        ("dask:tcp://127.0.0.1:1,timeout=soon", "cannot be read"),
        ("slurm:partitoin=x", "did you mean 'partition'"),
        ("slurm:cluster=local,cpus=two", "cpus=two is no number"),
        ("slurm:cluster=lokal", "did you mean 'local'"),
        ("dusk:x", "did you mean 'dask'"),
        ("local:3", "write --engine=local"),
    ],
)
def test_what_cannot_be_meant_is_one_line(engine: str, advice: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", *FOUR, f"--engine={engine}"]) == 2
    said = capfd.readouterr().err
    assert advice in said
    assert said.count("\n") == 1
