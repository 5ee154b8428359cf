"""A finished run is trained again without some of its examples, and the difference is kept beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import Problem, draw_problem
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.records.folder import RunFolder
from ntkexp.records.predictions import read_predictions
from ntkexp.records.provenance import PROVENANCE
from ntkexp.records.removal import FOLDER, Removal, read_removal, write_removal
from ntkexp.removal.again import again
from ntkexp.removal.group import ledger_between
from ntkexp.removal.ledger import Ledger
from ntkexp.removal.pair import Pair
from ntkexp.removal.rerun import Rerun
from ntkexp.run.environment import fix_circumstances
from ntkexp.run.execute import rebuilt
from ntkexp.text import short

REPEATED = 0.01
"""The training as it was must end where it did, to this share of what the removal changed."""


def without(
    run: Path, group: Sequence[int], points: Sequence[int], progress: AbstractProgress, trusted: tuple[str, ...] = ()
) -> Removal:
    """What leaving out these training examples changes at these points of the axis `probe`: found, or found earlier."""
    found = read_removal(run, group, points)
    if found is not None:
        return found
    folder = RunFolder(run)
    experiment = rebuilt(folder, trusted)
    fix_circumstances(experiment, folder.read_sealed(PROVENANCE)["threads"])  # so that rounding repeats
    with folder.claim():
        found = carry_out(folder, experiment, sorted(group), points, progress)
        write_removal(run, found)
    return found


def carry_out(
    folder: RunFolder, experiment: Experiment, group: list[int], points: Sequence[int], progress: AbstractProgress
) -> Removal:
    """Train twice, and go back over both."""
    problem, rerun = rerun_of(folder, experiment)
    first = 0 if "train" in problem.places else problem.train
    outs = experiment.path.chosen_outputs(problem.outputs)
    inputs = problem.inputs[[first + point for point in points]]
    chosen = torch.cartesian_prod(torch.arange(len(points)), torch.tensor(outs)).view(-1, 2)
    place = folder.path / FOLDER
    place.mkdir(exist_ok=True)
    weight = Pair(rerun.everyone, rerun.without(group))
    found = ledger_between(rerun, weight, inputs, chosen.to(inputs.device), place, progress).closed()
    shape = (len(points), len(outs))
    return Removal(
        probe=tuple(points),
        out=tuple(outs),
        example=tuple(group),
        actual=found.actual.view(shape).double().cpu().numpy(),
        shares=found.shares[:, group].view(*shape, -1).double().cpu().numpy(),
        by_step=found.by_step.view(*shape, -1).double().cpu().numpy(),
        growth=found.growth,
        repeated=repeated(folder, found, [(points[k], out) for k, out in chosen.tolist()]),
        emptied=sum(not rerun.batch(step).left(weight.second).any() for step in range(rerun.length)),
    )


def rerun_of(folder: RunFolder, experiment: Experiment) -> tuple[Problem, Rerun]:
    """The training of a finished run, to be carried out again."""
    facts = folder.vouched
    if facts["diverged"]:
        raise Mistake(f"{folder.path} diverged, so there is nothing that its examples made; choose a smaller step size")
    problem = draw_problem(experiment)
    return problem, again(experiment, problem, float(facts["step_size"]), int(facts["steps"]))


def repeated(folder: RunFolder, found: Ledger, places: Sequence[tuple[int, int]]) -> float:
    """How far the training as it was ended from where the run did, as a share of what the removal changed."""
    folder.check("predictions.zarr")
    known = read_predictions(folder.path / "predictions.zarr")["f_T"]
    ended = found.before.new_tensor([known[place] for place in places])
    missed, changed = float((found.before - ended).norm()), float(found.actual.norm())
    if missed > REPEATED * (changed or float(ended.norm())):
        raise Mistake(
            f"{folder.path}: trained again as it was, the run ends {short(missed)} from where it did, without these "
            f"examples {short(changed)}: its steps amplify rounding beyond the removal; choose a smaller step size"
        )
    return missed / changed if changed else missed
