"""The environment of a run (threads, device, deterministic algorithms), and a clock.

The clock measures two times for each part of a run:

    wall         elapsed time, which depends on the load of the machine
    processor    processor time of this process and of its terminated children

>>> ticks, work = iter([0.0, 60.0]), iter([1.0, 4.0])
>>> clock = Clock(wall=lambda: next(ticks), processor=lambda: next(work))
>>> with clock.times("run"):
...     pass  # three seconds of work during a minute
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
from ntkexp.experiment.identity import code_digests
from ntkexp.kernel.record.products import keep_full_precision
from ntkexp.mistake import Mistake
from ntkexp.records.folder import package_version, results_version
from ntkexp.records.results import Seconds

LIBRARIES = ("torch", "numpy", "numba", "zarr", "pandas", "matplotlib")


def commit() -> str | None:
    """Return the git commit of this package. Append "+" if tracked files were changed.

    Return None if the package was not imported from its git checkout.
    """
    folder = Path(__file__).resolve().parents[1]
    describe = ["describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    git = ["git", "-C", str(folder), *describe]
    try:
        result = subprocess.run(
            git, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # without pyproject.toml next to the package, this is another project's checkout
    if not (folder.parent / "pyproject.toml").is_file():
        return None
    return result.stdout.strip() or None


def fix_circumstances(experiment: Experiment, threads: int | None = None) -> None:
    """Set the number of threads, full float32 precision
    and deterministic algorithms in torch.

    Raise if this machine lacks the device.
    """
    check_device(experiment.device)
    torch.set_num_threads(threads or experiment.threads or all_threads())
    keep_full_precision()
    # cuBLAS needs this variable to be deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # equal to use_deterministic_algorithms(True), but faster: it imports no compiler
    torch.set_deterministic_debug_mode("error")


def all_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_device(name: str) -> None:
    """Raise if this machine lacks the device."""
    device = torch.device(name)
    names = ["cpu", *devices_of(device)]
    if device.type == "cpu" or (device.index is None and names[1:]) or name in names:
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        names += [other for other in devices_of(accelerator) if other not in names]
    raise Mistake(
        f"device={name}: this machine has {', '.join(names)} only; take one of these"
    )


def devices_of(device: torch.device) -> list[str]:
    """Return the names of this machine's devices of one type.

    >>> devices_of(torch.device("meta"))
    []
    """
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # this build of torch has no module for this type of device
        return []
    if not module.is_available():
        return []
    return [f"{device.type}:{index}" for index in range(module.device_count())]


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name for a device."""
    if device.type == "cpu":
        return platform.processor() or "cpu"
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_name"):
        return str(device)
    return str(module.get_device_name(device))


def provenance(experiment: Experiment, command: str, threads: int) -> dict[str, Any]:
    """Return the content of provenance.json: the command, versions, machine and
    settings of a run.

    If the user's files define the network, it also contains their digests."""
    code = code_digests(experiment)
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
        **({"code": code} if code else {}),
    }


def processor_seconds() -> float:
    """Return the processor time of this process and of its terminated children."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


@dataclass
class Clock:
    """The wall time and the processor time of each part of a run.

    `wall` and `processor` return the present time in seconds."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = processor_seconds
    parts: dict[str, Seconds] = field(default_factory=dict)
    # wall and processor time at the start of the current part
    since: tuple[float, float] | None = None

    @contextmanager
    def times(self, name: str) -> Iterator[None]:
        """Measure the time of the `with` block as the part `name`."""
        self.since = (self.wall(), self.processor())
        yield
        self.parts[name] = self.current
        self.since = None

    @property
    def current(self) -> Seconds:
        """The wall and processor time of the current part so far."""
        if self.since is None:
            return Seconds(0.0, 0.0)
        wall, processor = self.since
        return Seconds(self.wall() - wall, self.processor() - processor)

    @property
    def total(self) -> Seconds:
        """The wall and processor time of all parts, including the current one."""
        return sum([*self.parts.values(), self.current], start=Seconds(0.0, 0.0))
