"""Starting up: light, plain, and the same by every way in. Each test is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

HEAVY = ("torch", "hydra", "pandas", "numpy", "matplotlib", "sklearn", "xarray", "rich.progress")


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: sys.stderr.write(' '.join(m for m in {HEAVY!r} if m in sys.modules)))\n"
        "from ntkexp.cli.main import main\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--help"], "train"),
        ([], "train"),
        (["--version"], "ntkexp "),
        (["train", "--help"], "--force"),
        (["sweep", "--help"], "--dry-run"),
        (["report", "--help"], "--format"),
        (["kernel", "--help"], "predict"),
        (["kernel", "limit", "--help"], "--workers"),
        (["config", "--tree"], "model=mlp (default)"),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_to_explain_oneself(arguments: list[str], word: str) -> None:
    ended = start(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert word in ended.stdout
    assert "\x1b" not in ended.stdout


def test_a_run_loads_no_compiler() -> None:
    """What torch would load by itself to shield a dispatch mode, and to be deterministic."""
    program = (
        "import sys, torch, ntkexp\n"
        "from ntkexp.run.environment import settle\n"
        "from ntkexp.config.compose import compose\n"
        "settle(compose([]))\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "ntkexp.tangent_kernel(torch.nn.Linear(2, 1), torch.ones(3, 2))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ntkexp tr", ["train"]),
        ("ntkexp ", ["train", "sweep", "config", "resume", "report", "explain", "compare", "runs", "kernel"]),
        ("ntkexp sweep wi", ["width"]),
        ("ntkexp sweep width model.wi", ["model.width=", "model.width=512"]),
        ("ntkexp train model.wi", ["model.width=", "model.width=512"]),
        ("ntkexp train los", ["loss=", "loss.reduction="]),
        ("ntkexp train loss=s", ["loss=squared"]),
        ("ntkexp config optimizer=sgd optimizer.b", ["optimizer.batch=", "optimizer.batch=32"]),
        ("ntkexp config init.centred=", ["init.centred=false", "init.centred=true"]),
        ("ntkexp train path.rule=[s", ["path.rule=[secant]", "path.rule=[secant,"]),
        ("ntkexp train path.rule=[secant,", [f"path.rule=[secant,{n}{e}" for n in ("gauss", "left") for e in "],"]),
        ("ntkexp train --config-dir=nowhere mod", []),
        ("ntkexp train --qu", ["--quiet"]),
    ],
)
def test_a_shell_completes_whole_words(line: str, offered: list[str]) -> None:
    environment = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line}
    ended = start(_NTKEXP_COMPLETE="complete_fish", **environment)
    assert ended.stderr == ""
    assert [word.partition("\t")[0] for word in ended.stdout.split("\n") if word] == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "model.wi"], ["model.width=", "model.width=512"]),
        (["train", "loss", "="], ["cross_entropy", "hinge", "logistic", "squared"]),
        (["train", "loss", "=", "s"], ["squared"]),
        (["train", "optimizer", "=", "sgd", "optimizer.b"], ["optimizer.batch=", "optimizer.batch=32"]),
        (["train", "path.rule", "=", "[s"], ["[secant]", "[secant,"]),
    ],
    ids=" ".join,
)
def test_bash_completes_what_it_splits_at_equals_signs(words: list[str], offered: list[str]) -> None:
    line = "\n".join(["ntkexp", *words])
    ended = start(_NTKEXP_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words)))
    assert ended.stderr == ""
    assert ended.stdout.split() == offered


def into(stream: IO[str] | int, *arguments: str) -> tuple[int, str]:
    """The exit status and the complaints of a command whose output goes there."""
    ended = subprocess.run(
        [sys.executable, "-m", "ntkexp", *arguments], stdout=stream, stderr=subprocess.PIPE, text=True, check=False
    )
    return ended.returncode, ended.stderr


def test_a_closed_pipe_is_one_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert into(writing, "config", "--tree") == (1, "ntkexp: whoever read the output has gone away\n")
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that only Linux has")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        status, complaint = into(full, "--help")
    assert (status, complaint.count("\n")) == (1, 1)
    assert complaint.startswith("ntkexp: no space is left")
