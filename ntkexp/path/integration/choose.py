"""The one place that chooses how a path is integrated: by how the optimizer moves, and by what the settings say."""

from __future__ import annotations

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.path.integration.along_flow import AlongFlow
from ntkexp.path.integration.backward import Backward
from ntkexp.path.integration.base import AbstractIntegration
from ntkexp.path.integration.every_step import EveryStep
from ntkexp.path.integration.snapshots import Snapshots
from ntkexp.path.settings import Path


def choose_integration(optimizer: AbstractOptimizer, path: Path) -> AbstractIntegration:
    """The way that goes with both, or a mistake.

    >>> from ntkexp.optimizer.adam import Adam
    >>> from ntkexp.path.rule.left import Left
    >>> choose_integration(Adam(), Path(rule=(Left(),))).passes
    2
    """
    if not path.keeps_kernels and (optimizer.flows or optimizer.remembers):
        raise Mistake(
            f"path.kernels={path.kernels}: the path of optimizer={optimizer.option} is summed up as kernels; use "
            "optimizer=gd or sgd, or path.kernels=all"
        )
    if optimizer.flows:
        return AlongFlow(path=path)
    if optimizer.remembers:
        return Backward(path=path, optimizer=optimizer)
    return Snapshots(path=path) if path.every == "snapshots" else EveryStep(path=path)
