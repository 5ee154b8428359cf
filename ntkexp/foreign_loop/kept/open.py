"""A trace on disk is begun, or gone on with, for a model, its optimizers and the queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ntkexp.foreign_loop.kept.event import EventWriter
from ntkexp.foreign_loop.kept.keeper import KeeperOnDisk
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.members import moved_names
from ntkexp.foreign_loop.together import Together
from ntkexp.kernel.record.digest import digest
from ntkexp.kernel.record.inputs import tensors
from ntkexp.records.folder import RunFolder
from ntkexp.records.json_file import Json
from ntkexp.shapes import Inputs


def keeper_in(
    to: Path | str,
    ours: Together,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    queries: Inputs,
    output: str | int | None,
    *,
    every: int | None,
    memory_gb: float,
) -> KeeperOnDisk:
    """Who writes the trace of this training."""
    files = TraceFolder(RunFolder(Path(to).expanduser()), ours.rank)
    config = config_of(ours, module, optimizers, queries, output)
    followed = moved_names(module, optimizers)
    still = {name: part for name, part in module.state_dict().items() if name not in followed}
    start = {"queries": queries, "output": output, "still": still}
    return KeeperOnDisk(files, ours, config, start, EventWriter(files), output, every, memory_gb)


def config_of(
    ours: Together,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    queries: Inputs,
    output: str | int | None,
) -> dict[str, Json]:
    """What is followed, as far as it decides whether two traces can be one."""
    return {
        "follow": {
            "model": f"{type(module).__module__}.{type(module).__qualname__}",
            "parameters": sum(weight.numel() for weight in module.parameters()),
            "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
            "processes": ours.world,
            "output": output,
            "queries": digest(tensors(queries)).hex()[:16],
        },
        "path": {"probes": ["probe"]},  # as a run says where the network was read
    }
