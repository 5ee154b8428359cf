"""Commands start quickly, complete in shells, and end with one line in every environment.

One process forks itself for each command line.
"""

from __future__ import annotations

import json
import os
import pwd
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO
from unittest import mock

import pytest

from ntkexp.__main__ import main as way_in
from ntkexp.cli import main
from ntkexp.cli.main import set_up_process
from tests.cli.conftest import Command, Ended, check
from tests.run.commands import FORKS, TINY, only_run

HEAVY = ("torch", "hydra", "pandas", "numpy", "matplotlib", "sklearn", "xarray", "rich.progress")
ANSWERING = """
import atexit, json, os, sys
from ntkexp.cli.main import main

for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    asked = json.loads(line)
    for descriptor in (1, 2):
        os.dup2(os.open(asked["said"][descriptor - 1], os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(asked["environment"])
    sys.argv[1:] = asked["arguments"]
    atexit.register(lambda: sys.stderr.write(" ".join(name for name in asked["heavy"] if name in sys.modules)))
    main()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process, with the modules that every command imports."""
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        yield running


@pytest.fixture
def start(server: subprocess.Popen[str], tmp_path: Path) -> Command:
    """A function that runs a command line. stderr ends with the heavy modules that the command imported."""

    def call(*arguments: str, **environment: str) -> Ended:
        said = [tmp_path / "out", tmp_path / "err"]
        asked = {"arguments": arguments, "environment": environment, "said": list(map(str, said)), "heavy": HEAVY}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{json.dumps(asked)}\n")
        server.stdin.flush()
        return Ended(int(server.stdout.readline()), *(file.read_text("utf-8") for file in said))

    return call


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--help"], "  train      Train one network, and see which kernel machine it is.\n  sweep "),
        (["--version"], "ntkexp "),
        (["train", "--help"], "--force"),
        (["kernel", "--help"], "predict"),
        (["kernel", "limit", "--help"], "--workers"),
        (["config", "--tree"], "model=mlp (default)"),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_to_explain_oneself(arguments: list[str], word: str, start: Command) -> None:
    ended = start(*arguments)
    assert (ended.status, ended.err) == (0, "")
    assert word in ended.out
    assert "\x1b" not in ended.out


@pytest.mark.slow
def test_a_run_imports_what_draws_its_pictures_and_told_once_more_less(start: Command, tmp_path: Path) -> None:
    ended = start("train", *TINY, f"--out={tmp_path}", "--quiet")
    assert (ended.status, ended.err) == (0, "torch hydra pandas numpy matplotlib xarray")
    again = start("train", *TINY, f"--out={tmp_path}")
    assert again.out.endswith(f"{only_run(tmp_path)}\n")
    assert again.err.endswith("torch hydra numpy")


@pytest.mark.slow
def test_a_run_loads_no_compiler() -> None:
    """torch would load it for a dispatch mode, and for deterministic algorithms."""
    program = (
        "import sys, torch, ntkexp\n"
        "from ntkexp.run.environment import fix_circumstances\n"
        "from ntkexp.config.compose import compose\n"
        "fix_circumstances(compose([]))\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "ntkexp.tangent_kernel(torch.nn.Linear(2, 1), torch.ones(3, 2))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ntkexp tr", ["train"]),
        (
            "ntkexp ",
            [
                *("train", "sweep", "claims", "config", "resume", "report", "explain", "attribute", "validate"),
                *("compare", "runs", "kernel"),
            ],
        ),
        ("ntkexp sweep wi", ["width"]),
        ("ntkexp claims kernel_st", ["kernel_stays"]),
        ("ntkexp train model.wi", ["model.width=", "model.width=512"]),
        ("ntkexp config optimizer=sgd optimizer.b", ["optimizer.batch=", "optimizer.batch=32"]),
        ("ntkexp config init.centred=", ["init.centred=false", "init.centred=true"]),
        ("ntkexp train path.rule=[s", ["path.rule=[secant]", "path.rule=[secant,"]),
        ("ntkexp train path.rule=[secant,", [f"path.rule=[secant,{n}{e}" for n in ("gauss", "left") for e in "],"]),
        ("ntkexp train --config-dir=nowhere mod", []),
        ("ntkexp train --qu", ["--quiet"]),
    ],
)
def test_a_shell_completes_whole_words(line: str, offered: list[str], start: Command) -> None:
    environment = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line}
    ended = start(_NTKEXP_COMPLETE="complete_fish", **environment)
    assert ended.err == ""
    assert [word.partition("\t")[0] for word in ended.out.split("\n") if word] == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "model.wi"], ["model.width=", "model.width=512"]),
        (["train", "loss", "="], ["cross_entropy", "hinge", "logistic", "squared"]),
        (["train", "optimizer", "=", "sgd", "optimizer.b"], ["optimizer.batch=", "optimizer.batch=32"]),
        (["train", "path.rule", "=", "[s"], ["[secant]", "[secant,"]),
    ],
    ids=" ".join,
)
def test_bash_completes_what_it_splits_at_equals_signs(words: list[str], offered: list[str], start: Command) -> None:
    line = "\n".join(["ntkexp", *words])
    ended = start(_NTKEXP_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words)))
    assert ended.err == ""
    assert ended.out.split() == offered


def into(stream: IO[str] | int, *arguments: str) -> tuple[int, str]:
    """Return the exit status and stderr of a command whose stdout is this stream."""
    ended = subprocess.run(
        [sys.executable, "-m", "ntkexp", *arguments], stdout=stream, stderr=subprocess.PIPE, text=True, check=False
    )
    return ended.returncode, ended.stderr


def test_a_closed_pipe_is_one_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert into(writing, "config", "--tree") == (1, "ntkexp: the reader of the output has closed it\n")
    os.close(writing)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that only Linux has")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        status, complaint = into(full, "--help")
    assert (status, complaint.count("\n")) == (1, 1)
    assert complaint.startswith("ntkexp: the output cannot be written to stdout (No space left on device); ")


# In every environment a command succeeds or ends with one line.


def shell(line: str, **environment: str | None) -> tuple[int, str, str]:
    """Run a line of sh that calls `ntkexp`."""
    kept = {name: value for name, value in (os.environ | environment).items() if value is not None}
    script = f'ntkexp() {{ "{sys.executable}" -m ntkexp "$@"; }}; {line}'
    ended = subprocess.run(["sh", "-c", script], env=kept, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("given", ["abc", "0", "-3", "99999999999999999999", "", "2,zwei"])
def test_a_number_of_threads_that_is_none(given: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    check(command("config"), f"ntkexp: OMP_NUM_THREADS={given}: it takes")


@pytest.mark.parametrize("words", [("train",), ("sweep", "width"), ("config",), ("report",)])
def test_too_few_files_may_be_open(words: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    assert command(*words) == (1, "", "ntkexp: too many files are open; raise the limit (ulimit -n)\n")


def test_no_more_threads(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,1")
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    check(command("--version"), "ntkexp: no more threads can be started; ", status=1)


LITTLE_MEMORY = ("raise the limit (ulimit -v)\n", "no memory is left")


@pytest.mark.parametrize(
    ("line", "status", "messages"),
    [
        (
            "mkdir gone; cd gone; rmdir ../gone; ntkexp config",
            2,
            ("the working folder is gone; go to one that exists\n",),
        ),
        ('mkdir "$ODD"; cd "$ODD"; ntkexp config', 2, (r"/caf\udce9: this name is not UTF-8",)),
        *((f"ulimit -v {kilobytes}; ntkexp config", 1, LITTLE_MEMORY) for kilobytes in (25_000, 300_000)),
    ],
)
def test_an_unfit_process_is_one_line(line: str, status: int, messages: tuple[str, ...], tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    ended = shell(f"cd {tmp_path}; {line}", PYTHONPATH=str(Path(main.__file__).parents[2]), ODD=odd)
    check(ended, status=status)
    assert any(message in ended[2] for message in messages), ended


@pytest.mark.parametrize("words", [("train", "--out=caf\udce9"), ("runs", "--out=caf\udce9"), ("explain", "caf\udce9")])
def test_a_word_that_is_not_utf8(words: tuple[str, ...], command: Command) -> None:
    check(command(*words), r"caf\udce9: this name is not UTF-8")


@pytest.mark.slow
def test_a_warning_of_a_trusted_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import warnings\nfrom torch import nn\nwarnings.warn('mind\\nthe gap')\n"
        "def build(outputs):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    words = f"model=module model.path={file}:build --trust={file} --out={tmp_path} {' '.join(TINY)}"
    said = f"{file}, line 3: UserWarning: mind the gap\n"
    assert shell(f"ntkexp train {words} --quiet") == (0, "", f"ntkexp: {said}")
    status, _, err = shell(f"ntkexp sweep seed=1..2 --workers=2 {words} --quiet")
    assert (status, err.count("\n"), err.count(said)) == (0, 3, 3), err


@pytest.mark.slow
def test_an_exception_in_a_trusted_file_has_a_traceback_in_development_mode(tmp_path: Path) -> None:
    file = tmp_path / "own_loss.py"
    file.write_text(
        "from ntkexp.loss import Squared\nclass Own(Squared):\n    def value(self, outputs, targets):\n        1 / 0\n"
    )
    line = f"ntkexp train loss._target_=own_loss.Own --trust={file} --out={tmp_path} {' '.join(TINY)} --quiet"
    said = f"ntkexp: {file}, line 4, in value: ZeroDivisionError: division by zero; PYTHONDEVMODE=1"
    assert shell(line)[2].startswith(said)
    status, _, err = shell(line, PYTHONDEVMODE="1")
    assert status == 1
    assert "Traceback (most recent call last)" in err


@pytest.mark.parametrize("closed", ["1", "2", "0", "0<&- 1>&- 2"])
def test_closed_streams(closed: str) -> None:
    status, _, err = shell(f"ntkexp --version {closed}>&-")
    assert (status, err) == (0, "")


def test_letters_that_a_terminal_lacks() -> None:
    status, out, err = shell("ntkexp config --tree", PYTHONIOENCODING="ascii")
    assert (status, err) == (0, "")
    assert "√2".encode("ascii", "backslashreplace").decode() in out


def test_no_home(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    check(command("runs", "--out=~/x"), "there is no home folder for ~; write the whole path, or set HOME")


def interrupted_throughout(said: Path) -> None:
    """Send SIGTERM to a command while it works, while it prints its error, and while it ends."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    set_up_process()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def complain(text: str, status: int, say: object = main.write_error) -> int:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert callable(say)
        return int(say(text, status))

    with (
        mock.patch.object(main, "execute", side_effect=lambda _: signal.raise_signal(signal.SIGTERM)),
        mock.patch.object(main, "write_error", complain),
    ):
        status = main.run([])
    signal.raise_signal(signal.SIGTERM)
    raise SystemExit(status)


@pytest.mark.slow
def test_a_second_signal_changes_nothing(tmp_path: Path) -> None:
    process = FORKS.Process(target=interrupted_throughout, args=(tmp_path / "said",))
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "said").read_text()) == (130, "ntkexp: interrupted\n")


def test_a_home_that_cannot_be_written() -> None:
    program = "import ntkexp.report.plots.style, matplotlib.pyplot"
    environment = {name: value for name, value in os.environ.items() if name not in {"MPLCONFIGDIR", "XDG_CONFIG_HOME"}}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"HOME": "/dev/null"}, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


class Slow(ModuleType):
    """A module whose import is interrupted by Ctrl-C."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_ctrl_c_while_everything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ntkexp.cli.main", Slow("ntkexp.cli.main"))
    with pytest.raises(SystemExit) as caught:
        way_in()
    assert (caught.value.code, capsys.readouterr().err) == (130, "ntkexp: interrupted\n")
