"""Where and how a run computes, fixed before it begins: threads, device, determinism; and what each part takes by the
clock.

What each part of a piece of work takes: by the clock on the wall, and by the processor.

    wall         from its beginning to its end, with whatever else the machine did meanwhile
    processor    while its threads, and children that have ended, were computing: so long takes one idle core

>>> ticks, work = iter([0.0, 60.0]), iter([1.0, 4.0])
>>> clock = Clock(wall=lambda: next(ticks), processor=lambda: next(work))
>>> with clock.times("run"):
...     pass  # three seconds of work, during a minute in which others were at work as well
>>> clock.parts
{'run': Seconds(wall=60.0, processor=3.0)}
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ntkexp.experiment.experiment import Experiment
from ntkexp.kernel.record.products import keep_full_precision
from ntkexp.mistake import Mistake
from ntkexp.records.folder import package_version, results_version
from ntkexp.records.results import Seconds

LIBRARIES = ("torch", "numpy", "numba", "zarr", "pandas", "matplotlib")


def commit() -> str | None:
    """The commit of the checkout that this package lies in, if it lies in one; with a + if anything is changed."""
    folder = Path(__file__).resolve().parents[1]
    git = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        answer = subprocess.run(git, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    beside = (
        folder.parent / "pyproject.toml"
    ).is_file()  # else it is installed into another project's checkout
    return answer.stdout.strip() or None if beside else None


def fix_circumstances(experiment: Experiment, threads: int | None = None) -> None:
    """Fix the number of threads, full precision, and deterministic algorithms."""
    check_device(experiment.device)
    torch.set_num_threads(threads or experiment.threads or all_threads())
    keep_full_precision()
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # without it, cuBLAS may not be deterministic
    torch.set_deterministic_debug_mode(
        "error"
    )  # what use_deterministic_algorithms does, without loading a compiler


def all_threads() -> int:
    """One for every core that this process may use."""
    return len(os.sched_getaffinity(0))


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    device = torch.device(name)
    names = ["cpu", *devices_of(device)]
    if device.type == "cpu" or (device.index is None and names[1:]) or name in names:
        return
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        names += [each for each in devices_of(accelerator) if each not in names]
    raise Mistake(f"device={name}: this machine has {', '.join(names)} only; take one of these")


def devices_of(device: torch.device) -> list[str]:
    """Return the devices of one kind that this machine has.

    >>> devices_of(torch.device("meta"))
    []
    """
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # torch knows the name, and this build of it nothing more
        return []
    return (
        [f"{device.type}:{index}" for index in range(module.device_count())]
        if module.is_available()
        else []
    )


def device_name(device: torch.device) -> str:
    """Return the maker's name of a device."""
    if device.type == "cpu":
        return platform.processor() or "cpu"
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
    )


def provenance(experiment: Experiment, command: str, threads: int) -> dict[str, Any]:
    """What wrote a run, and where: `command`, given in `folder`, asks for the same experiment."""
    return {
        "command": command,
        "folder": os.getcwd(),
        "seed": experiment.seed,
        "ntkexp": package_version(),
        "commit": commit(),
        "results_version": results_version,
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "platform": platform.platform(),
        "device": device_name(torch.device(experiment.device)),
        "threads": threads,
        "deterministic": True,
    }


def processor_seconds() -> float:
    """Read how long processors have worked for this process, and for those of its children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


@dataclass
class Clock:
    """What took how long; both clocks can be replaced."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = processor_seconds
    parts: dict[str, Seconds] = field(default_factory=dict)
    since: tuple[float, float] | None = None  # both clocks, when the part that is going on began

    @contextmanager
    def times(self, what: str) -> Iterator[None]:
        """Count the time spent inside."""
        self.since = self.wall(), self.processor()
        yield
        self.parts[what], self.since = self.current, None

    @property
    def current(self) -> Seconds:
        """What the part that is going on has taken."""
        if self.since is None:
            return Seconds(0.0, 0.0)
        wall, processor = self.since
        return Seconds(self.wall() - wall, self.processor() - processor)

    @property
    def whole(self) -> Seconds:
        """What all parts have taken, with the one that is going on."""
        return sum([*self.parts.values(), self.current], start=Seconds(0.0, 0.0))
