"""Whatever a process finds around itself, it ends with what was asked for or with one line of its own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from ntkexp.__main__ import main as way_in
from ntkexp.cli import main
from ntkexp.cli.main import settle
from tests.cli.conftest import Command
from tests.run.commands import FORKS


def shell(line: str, **environment: str | None) -> tuple[int, str, str]:
    """A command line of sh, in which `ntkexp` is the command."""
    kept = {name: value for name, value in (os.environ | environment).items() if value is not None}
    script = f'ntkexp() {{ "{sys.executable}" -m ntkexp "$@"; }}; {line}'
    ended = subprocess.run(["sh", "-c", script], env=kept, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("given", ["abc", "0", "-3", "99999999999999999999", "", "2,zwei"])
def test_a_number_of_threads_that_is_none(given: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    status, out, err = command("config")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ntkexp: OMP_NUM_THREADS={given}: it takes")


def test_no_more_threads(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("OMP_NUM_THREADS", "4,1")
    monkeypatch.setattr(threading.Thread, "start", start)
    status, out, err = command("--version")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("ntkexp: no more threads can be started; ")


@pytest.mark.parametrize("words", [("train",), ("sweep", "width"), ("config",), ("report",)])
def test_too_few_files_may_be_open(words: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    assert command(*words) == (1, "", "ntkexp: too many files are open; raise the limit (ulimit -n)\n")


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    ended = shell(f"cd {tmp_path}/gone; rmdir ../gone; ntkexp config", PYTHONPATH=str(Path(main.__file__).parents[2]))
    assert ended == (2, "", "ntkexp: the working folder is gone; go to one that exists\n")


@pytest.mark.parametrize("closed", ["1", "2", "0", "0<&- 1>&- 2"])
def test_closed_streams(closed: str) -> None:
    status, _, err = shell(f"ntkexp --version {closed}>&-")
    assert (status, err) == (0, "")


def test_letters_that_a_terminal_lacks() -> None:
    status, out, err = shell("ntkexp config --tree", PYTHONIOENCODING="ascii")
    assert (status, err) == (0, "")
    assert "√2".encode("ascii", "backslashreplace").decode() in out


def test_no_home(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert command("runs", "--out=~nobody/x") == (
        2,
        "",
        "ntkexp: ~ stands for no folder here; write the whole path, or set HOME\n",
    )


def interrupted_throughout(said: Path) -> None:
    """A command to which SIGTERM comes as it works, as it says so, and as it leaves."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    settle()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def complain(text: str, status: int, say: object = main.complain) -> int:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert callable(say)
        return int(say(text, status))

    with (
        mock.patch.object(main, "execute", side_effect=lambda _: signal.raise_signal(signal.SIGTERM)),
        mock.patch.object(main, "complain", complain),
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
    """A module in whose import Ctrl-C comes."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_ctrl_c_while_everything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ntkexp.cli.main", Slow("ntkexp.cli.main"))
    with pytest.raises(SystemExit) as caught:
        way_in()
    assert (caught.value.code, capsys.readouterr().err) == (130, "ntkexp: interrupted\n")
