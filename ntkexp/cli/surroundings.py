"""What stands around a command: what a process finds and puts right, interruption, advice, and the options that
repeat a result.

What a process finds around itself, put right or refused before a library is loaded that would complain in its words.

>>> refuse_threads({"OMP_NUM_THREADS": "four"})
Traceback (most recent call last):
ntkexp.mistake.Mistake: OMP_NUM_THREADS=four: it takes a whole number ≥ 1 and ≤ 1024; unset it, or write threads=4

A mistake as the command line says it: its arguments are options, and by its kind there is one that puts it right.

>>> with_advice(WrongArgument("memory_gb=0: it takes a number > 0", "memory_gb"))
'--memory-gb=0: it takes a number > 0'
>>> with_advice(NoPlace("the disk is full; choose another place"))
'the disk is full; choose another place with --out'

The options that stand beside results, with the words of the command: what repeats them.

>>> options(Path("outputs"), ["net.py"], Path("mine")), options(Path("there"))
(['--trust=net.py', '--config-dir=mine'], ['--out=there'])
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ntkexp.mistake import HydraSetting, Mistake, NoPlace, UnknownKey, Untrusted, Useless, WrongArgument

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
MOST = 1024
FILES = 64
"""Files that may be open at least: a run has about 15, and a sweep some more for each worker."""


def settle() -> None:
    """Put right what a process finds, before everything else."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow down whoever shares the cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is Ctrl-C
    open_streams()


def open_streams() -> None:
    """Open streams that were closed, lest a file gets their number; letters that a terminal lacks get codes."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # at its start, it is a text file


def refuse_unfit() -> None:
    """Refuse surroundings that no command can work in."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Mistake("the working folder is gone; go to one that exists") from None
    # at a small limit of open files some library or worker would fail half way, in words of its own
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < FILES:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    refuse_threads(os.environ)
    refuse_without_threads()


def refuse_threads(environment: Mapping[str, str]) -> None:
    """Refuse numbers of threads that are none; OpenMP takes a list, one for each level."""
    for name in THREADS:
        given = environment.get(name, "1")
        counts = given.split(",") if name == "OMP_NUM_THREADS" else [given]
        if not all(map(is_count, counts)):
            raise Mistake(f"{name}={given}: it takes a whole number ≥ 1 and ≤ {MOST}; unset it, or write threads=4")


def is_count(given: str) -> bool:
    """Whether so many threads can be meant.

    >>> [count for count in ("1", " 08", "1024", "0", "1025", "four", "") if is_count(count)]
    ['1', ' 08', '1024']
    """
    return re.fullmatch(r"\s*0*[1-9]\d{0,3}\s*", given) is not None and int(given) <= MOST


def refuse_without_threads() -> None:
    """Refuse a machine without threads to spare: libraries of linear algebra start one for every core when loaded."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    enough = threading.Event()
    started = [threading.Thread(target=enough.wait) for _ in range(int(asked or len(os.sched_getaffinity(0))) - 1)]
    try:
        for thread in started:
            thread.start()  # raises what `ntkexp.engine.base` puts in words
    finally:
        enough.set()


# --- Ctrl-C, or a polite kill, ends a command with one line that says how to go on.


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """Let an interrupt say more than that it was one: `advice` is asked for when it happens."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{advice()}") from None


@contextmanager
def polite_kill() -> Iterator[None]:
    """Let SIGTERM be heard as Ctrl-C is, also in a notebook, whose process is not ours."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


ADVICE: Mapping[type[Mistake], str] = {
    NoPlace: " with --out",
    Useless: " with --force",
    Untrusted: "; add `--trust {source}`",
    HydraSetting: "; --out says where runs go, --config-dir adds YAML",
    UnknownKey: "; `ntkexp config --tree` shows every key",
}
"""What follows the message of each kind of mistake."""

AGAIN = "; --force computes it again"
"""What follows where a finished result is found."""


def with_advice(mistake: Mistake) -> str:
    """Give the message of a mistake, with advice in words of the command line."""
    said = str(mistake)
    for argument in mistake.arguments if isinstance(mistake, WrongArgument) else ():
        said = re.sub(rf"\b{argument}=", f"--{argument.replace('_', '-')}=", said)
    advice = next((words for kind, words in ADVICE.items() if isinstance(mistake, kind)), "")
    return said + advice.format_map(vars(mistake))


OUTPUTS = Path("outputs")
"""Where results go if nobody says."""


def trusted(entries: Sequence[str]) -> tuple[str, ...]:
    """What is trusted, as it is spelled in any folder."""
    return tuple(str(Path(entry).expanduser().absolute()) if entry.endswith(".py") else entry for entry in entries)


def options(out: Path = OUTPUTS, trust: Sequence[str] = (), config_dir: Path | None = None) -> list[str]:
    """The options without which the words of a command mean something else, or its results lie elsewhere."""
    place = [f"--out={out}"] if out != OUTPUTS else []
    return [*place, *(f"--trust={entry}" for entry in trust), *([f"--config-dir={config_dir}"] if config_dir else [])]
