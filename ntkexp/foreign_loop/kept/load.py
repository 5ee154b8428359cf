"""A trace that another process wrote: its steps, for a module of the kind that was followed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ntkexp.foreign_loop.kept.asked_itself import ends_in
from ntkexp.foreign_loop.kept.loop_on_disk import LoopOnDisk
from ntkexp.foreign_loop.kept.replayed_steps import ReplayedSteps
from ntkexp.foreign_loop.kept.trace_folder import START, TraceFolder
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.records.folder import CONFIG, RunFolder
from ntkexp.records.json_file import read_object


def trace_in(folder: Path) -> TraceFolder:
    """The trace in a folder, if it holds one."""
    files = TraceFolder(RunFolder(folder.expanduser()))
    path = files.folder.path
    if not (path / CONFIG).is_file() or "follow" not in read_object(path / CONFIG):
        raise Mistake(f"{path} holds no trace; ntkexp.follow(…, to=…) writes one")
    return files


def loaded(files: TraceFolder, module: nn.Module) -> Trace:
    """The trace, with a module to which its weights are given."""
    start = files.read(files.path / START)
    fill(module, start, files.read(files.weights_at(0))["weights"], files.folder.path)
    kinds = read_object(files.folder.path / CONFIG)["follow"]["optimizers"]
    steps = ReplayedSteps(LoopOnDisk(files), module, start["output"], kinds)
    return Trace(steps, module, start["output"], start["queries"], folder=files.folder, ends=ends_in(files))


def names_in(files: TraceFolder) -> list[str]:
    """The examples of a trace, in order of their first use; no module is asked for."""
    return list(dict.fromkeys(ReplayedSteps(LoopOnDisk(files), nn.Module(), None, ()).names()))


def fill(module: nn.Module, start: Mapping[str, Any], weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Give a module all that the followed one held, if it is of that kind."""
    state, given = dict(module.named_parameters()) | dict(module.named_buffers()), {**start["still"], **weights}
    named = state.keys() | module.state_dict().keys()
    wrong = sorted(weights.keys() - state.keys()) or sorted(given.keys() - named)
    wrong = wrong or [name for name in given.keys() & state.keys() if state[name].shape != given[name].shape]
    if wrong:
        raise Mistake(
            f"the module is not the one that was followed in {path}: its '{wrong[0]}' is missing or otherwise"
        )
    with torch.no_grad():
        for name in given.keys() & state.keys():
            state[name].data = given[name].clone().to(state[name].device)
    module.eval()
