"""What came out of a run, written down file by file: the same bytes each time, but for the weights' container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntkexp.machine.base import Prediction
from ntkexp.machine.evidence import PathKernel
from ntkexp.machine.ladder import results
from ntkexp.on_disk import RowsOfArray
from ntkexp.path.accumulate.mark import Share
from ntkexp.path.accumulate.step_totals import StepTotals
from ntkexp.records.atomic import being_written
from ntkexp.records.contributions import ByStep, ContributionsByRule, add_effect, write_contributions
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import finish_kernels, write_path_kernel
from ntkexp.records.leave_out import STORE, write_leave_out
from ntkexp.records.phases import ContributionsByPhase, add_phases
from ntkexp.records.predictions import write_predictions
from ntkexp.records.results import write_results
from ntkexp.run.outcome import Outcome
from ntkexp.run.phases_found import PhasesFound
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights


def write(folder: RunFolder, setting: Setting, outcome: Outcome) -> None:
    """What came out, file by file."""
    path, evidence, read = folder.path, outcome.evidence, setting.domain.read
    kernels = path / "kernels.zarr"
    finish_kernels(kernels)
    for name, integral in evidence.paths.items():
        if evidence.keeps_kernels:
            known = evidence.attributed[read].nonzero()[:, 0].tolist()
            write_path_kernel(kernels, name, array(integral.kernel), known, evidence.integrated)
    decays = bool(setting.experiment.optimizer.weight_decay)
    parts = {
        name: by_rule(integral, outcome.by_step[name], outcome.steps, decays=decays)
        for name, integral in evidence.paths.items()
    }
    examples = setting.problem.data.train.index.tolist()
    write_contributions(path / "contributions.zarr", parts, examples, evidence.integrated)
    if outcome.phases is not None:
        add_phases(path / "contributions.zarr", phases_of(setting, outcome.phases, read, decays=decays))
    if outcome.effects is not None:
        add_effect(path / "contributions.zarr", array(outcome.effects.values[read]), outcome.effects.facts)
        if outcome.effects.check is not None:
            write_leave_out(path / STORE, outcome.effects.check)
    predicted = {rung.name: rung.outcome.outputs for rung in outcome.rungs if isinstance(rung.outcome, Prediction)}
    outputs = {"f_0": evidence.start, "f_T": evidence.end, **predicted}
    write_predictions(path / "predictions.zarr", {name: array(value[read]) for name, value in outputs.items()})
    table = results(outcome.rungs, outcome.regions, evidence, bool(setting.problem.data.classes))
    write_results(path / "results.csv", table)
    with being_written(path / "weights.pt") as file:
        torch.save(both_ends(setting.problem.weights, outcome.weights), file)


def both_ends(start: Weights, end: Weights) -> dict[str, Weights]:
    """The weights of both ends by the same names, for pickle writes again what is equal but not the same: a run that
    went on from its last step would be told by its bytes.
    """
    return {"start": start, "end": {name: end[name] for name in start}}


def by_rule(integral: PathKernel, totals: StepTotals, steps: int, *, decays: bool) -> ContributionsByRule:
    """What a rule says of the points that were read, on a path of so many steps."""
    return ContributionsByRule(
        parts=RowsOfArray(integral.contributions),
        decay=array(integral.decay) if decays else None,
        half_by=None if integral.half_by is None else array(integral.half_by),
        by_step=ByStep(array(totals.stacked().movedim(0, 2)), totals.until(steps)),
        facts=integral.facts,
    )


def phases_of(setting: Setting, found: PhasesFound, read: slice, *, decays: bool) -> ContributionsByPhase:
    """What happened in each phase at the points that were read."""
    problem, points = setting.problem, np.zeros(len(setting.problem.targets), dtype=np.int64)
    for places in problem.phases.values():
        for number, place in enumerate(places, start=1):
            points[place] = number
    return ContributionsByPhase(
        names=problem.data.phases,
        examples=points[: problem.train],
        points=points[read],
        change=array(found.change[:, read]),
        parts={rule: [share.contributions for share in shares] for rule, shares in found.shares.items()},
        decay={rule: decay_of(shares) for rule, shares in found.shares.items()} if decays else {},
    )


def decay_of(shares: Sequence[Share]) -> np.ndarray[Any, Any]:
    """What decay of the weights took away in each phase."""
    return array(torch.stack([share.decay for share in shares]))


def arrays(setting: Setting) -> dict[str, np.ndarray[Any, Any]]:
    """The examples of every split, for `data.npz`."""
    classes = len(setting.problem.data.classes)
    found: dict[str, np.ndarray[Any, Any]] = {"classes": np.array(setting.problem.data.classes, dtype=str)}
    for name in ("train", "probe", "test"):
        split = getattr(setting.problem.data, name)
        found |= {f"{name}_{part}": getattr(split, part).numpy() for part in ("shown", "inputs", "target", "index")}
        found[f"{name}_targets"] = setting.experiment.loss.targets(split.target, classes).numpy()
        if split.phase is not None:
            found[f"{name}_phase"] = split.phase.numpy() + 1
    if setting.problem.data.phases:
        found["phases"] = np.array(setting.problem.data.phases, dtype=str)
    if setting.problem.data.phase_classes:
        found["phase_classes"] = np.array(setting.problem.data.phase_classes, dtype=str)
    return found


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as a numpy array."""
    return tensor.detach().cpu().numpy()
