"""An engine that carries out tasks in this process, and can lose a worker at any tile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.engine.base import AbstractEngine, AbstractWorkers, Ended, Event, ReportEvent, Stepped, Task, work
from ntkexp.kernel_file.fill import fill
from ntkexp.kernel_file.kernel import AbstractKernel
from ntkexp.records.kernel_file import KernelMatrix

Loses: TypeAlias = Callable[[int, int], bool]
"""A function of the numbers of a task and a tile. It returns True if the worker is lost after this tile, or before the
first tile if the number of the tile is 0."""


def none_lost(task: int, tile: int) -> bool:
    """Lose no worker."""
    return False


@dataclass
class Here(AbstractEngine):
    workers: int
    threads: int = 1
    loses: Loses = none_lost
    tasks: int = 0

    def open(self, report_event: ReportEvent) -> HereWorkers:
        return HereWorkers(self)


@dataclass
class HereWorkers(AbstractWorkers):
    """Workers that carry out each task at once."""

    engine: Here

    def submit(self, task: Task) -> Future[Ended]:
        home, future = os.getcwd(), Future[Ended]()
        self.engine.tasks += 1
        if self.engine.loses(self.engine.tasks, 0):  # it sends no further event
            future.set_result(Ended(task.name, "killed", "its process was killed"))
        else:
            ended = work(replace(task, threads=self.engine.threads), self.lose_after)
            future.set_result(Ended(**json.loads(json.dumps(asdict(ended)))))  # clusters send text
        os.chdir(home)
        return future

    def shutdown(self) -> None:
        """Do nothing, because all tasks have ended."""

    def lose_after(self, event: Event) -> None:
        """Lose the worker after the event of a tile, if the engine does."""
        if isinstance(event, Stepped) and self.engine.loses(self.engine.tasks, event.step):
            raise KeyboardInterrupt


# Kernels whose numbers are known without a file: products of features.


SIZES = ("data.train=70", "data.query=30", "data.test=45")  # none is a multiple of 32


def filled(path: Path, kernel: AbstractKernel, *, force: bool = False) -> KernelMatrix:
    """Compute a kernel file by threads."""
    return fill(kernel, path, force=force)


@dataclass(frozen=True, eq=False)
class Products(AbstractKernel):
    """The kernels `nngp` = ⟨x, x′⟩ and `ntk` = ⟨x, x′⟩ + (1 + ⟨x, x′⟩)². They fail after `fails_after` tiles."""

    fails_after: float = float("inf")
    seen: list[int] = field(default_factory=list)
    each: float = 0.0

    @classmethod
    def of(cls, *overrides: str, **fields: Any) -> Self:
        experiment = compose([*SIZES, *overrides])
        return cls(experiment, experiment.draw(), **fields)

    @property
    def names(self) -> tuple[str, ...]:
        return ("nngp", "ntk")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "products"}

    @property
    def concurrent(self) -> bool:
        return True

    @property
    def seconds_per_pair(self) -> float:
        return self.each

    def blocks(self, left: Tensor, right: Tensor | None = None) -> Mapping[str, Tensor]:
        if len(self.seen) >= self.fails_after:
            raise KeyboardInterrupt
        self.seen.append(len(left))
        products = products_of(left, left if right is None else right)
        return {"nngp": products[:, None, :, None], "ntk": (products + (1 + products) ** 2)[:, None, :, None]}


def products_of(left: Tensor, right: Tensor) -> Tensor:
    """Return ⟨x, x′⟩/64. The order of summation does not depend on the number of points."""
    return (left.flatten(1)[:, None] * right.flatten(1)).sum(2) / 64


def whole(kernel: Products) -> dict[str, Tensor]:
    """Return the expected kernels of a file, [point, train]."""
    blocks = kernel.blocks(kernel.inputs, kernel.inputs[: len(kernel.data.train.inputs)])
    return {name: block[:, 0, :, 0] for name, block in blocks.items()}
