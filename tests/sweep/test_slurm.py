"""Jobs by submitit: on this machine in place of Slurm, and the script that Slurm would get."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitit.slurm.slurm import _make_sbatch_string

from ntkexp.cli.entry import run
from ntkexp.engine.slurm import USUAL, open_engine
from tests.sweep.commands import TINY, states, swept

TWO = ("model.width=8,9", *TINY)


@pytest.mark.slow
def test_jobs_carry_runs_out(tmp_path: Path) -> None:
    found = swept(tmp_path, *TWO, "--engine=slurm:cluster=local,cpus=1")
    assert found.status == 0, found
    assert states(tmp_path) == ["done", "done"]


def test_what_is_asked_for_stands_in_the_script() -> None:
    engine = open_engine("cluster=local,partition=short,time=90,cpus=4,gpus=1", None)
    names = {"timeout_min": "time", "slurm_signal_delay_s": "signal_delay_s", "slurm_partition": "partition"}
    known = {names.get(key, key): value for key, value in engine.parameters.items() if key != "mem_gb"}
    script = _make_sbatch_string("command", "folder", **known)
    for line in ("--partition=short", "--time=90", "--cpus-per-task=4", "--gpus-per-node=1", "--signal=USR2@120"):
        assert f"#SBATCH {line}" in script
    assert engine.workers == 100


def test_what_is_not_asked_for_is_as_usual() -> None:
    assert open_engine("cluster=local", 3).parameters == USUAL


@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("partitoin=x", "did you mean 'partition'"),
        ("cluster=local,cpus=two", "cpus=two is no number"),
        ("cluster=lokal", "did you mean 'local'"),
    ],
)
def test_what_cannot_be_meant_is_one_line(where: str, advice: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", *TWO, f"--engine=slurm:{where}"]) == 2
    said = capfd.readouterr().err
    assert advice in said
    assert said.count("\n") == 1
