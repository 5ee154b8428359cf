"""Looking back on a finished walk: what kernel machines make of it, and how well its parts are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.diagnostics.contributions import summary
from ntkexp.kernel.secant.closure import Closure
from ntkexp.machine.evidence import Evidence, PathKernel
from ntkexp.machine.ladder import Region, Rung
from ntkexp.machine.training import Training
from ntkexp.run.same_steps import SameSteps
from ntkexp.run.setting import Setting
from ntkexp.run.state import Walk
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class Ending:
    """Why a run ended."""

    sentence: str
    diverged: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    evidence: Evidence
    places: Mapping[str, Region]
    rungs: list[Rung]
    weights: Weights
    steps: int
    diverged: bool
    sentence: str


def look_back(
    walk: Walk, outputs: Float[Tensor, "point out"], kernel: Float[Tensor, "point out train out_"], ending: Ending
) -> Outcome:
    """From the outputs and the tangent kernel at the end of training."""
    setting = walk.setting
    evidence = Evidence(
        inputs=setting.points.inputs.flatten(1),
        train=setting.points.train,
        start=setting.outputs,
        end=outputs,
        targets=setting.descent.targets,
        paths=path_kernels(walk),
        kernel_start=setting.kernel,
        kernel_end=kernel,
        start_pull=start_pull(setting),
        integrated=setting.integrated,
        attributed=torch.isin(torch.arange(len(outputs), device=outputs.device), setting.attributed),
        limit=setting.limit,
        training=training(walk),
    )
    rungs = setting.experiment.ladder.climb(evidence)
    sentence = "; ".join([ending.sentence, *setting.remarks, *unclosed(walk.unclosed)])
    return Outcome(evidence, sizes(walk), rungs, walk.weights, walk.step, ending.diverged, sentence)


def unclosed(steps: Mapping[int, Closure]) -> list[str]:
    """A word about steps whose secant misses the change of the network by more than rounding explains.

    >>> unclosed({3: Closure(1e-3, 1e-9), 7: Closure(1e-2, 1e-9)})
    ['the secant misses 2 steps, most of all step 7: by 0.01 where rounding explains 1e-09; try path.rule=[gauss]']
    """
    if not steps:
        return []
    worst = max(steps, key=lambda step: steps[step].miss)
    missed = (
        f"the secant misses {len(steps)} steps, most of all step {worst}"
        if len(steps) > 1
        else f"the secant misses step {worst}"
    )
    return [f"{missed}: {steps[worst].words}; try path.rule=[gauss]"]


def path_kernels(walk: Walk) -> dict[str, PathKernel]:
    """The integrals, named by their rules."""
    path = walk.setting.experiment.path
    details = {rule.option: path.detail(rule) for rule in path.rule}
    if walk.setting.experiment.optimizer.flows:
        details = {"gauss": f"nodes={path.nodes} in time"}
    found = {}
    for name, integrals in walk.ledger.integrals.items():
        kernel, contributions, decay = (widened(part, walk.setting) for part in integrals.parts)
        half_by = walk.ledger.half_by(name)
        found[name] = PathKernel(
            kernel=kernel,
            contributions=contributions,
            decay=decay,
            detail=details[name],
            facts=known(walk, name),
            half_by=None if half_by is None else widened(half_by, walk.setting),
        )
    return found


def widened(part: Float[Tensor, "point integrated ..."], setting: Setting) -> Float[Tensor, "point out ..."]:
    """With all outputs, NaN where the path is not integrated."""
    outputs = setting.outputs.shape[1]
    if part.shape[1] == outputs:
        return part
    wide = part.new_full((len(part), outputs, *part.shape[2:]), torch.nan)
    wide[:, setting.integrated] = part
    return wide


def training(walk: Walk) -> Training:
    """How training went."""
    setting, optimizer = walk.setting, walk.setting.experiment.optimizer
    time = walk.time
    return Training(
        time=time,
        weight=setting.weight * setting.experiment.loss.curvature,
        is_quadratic=setting.experiment.loss.is_quadratic,
        is_plain=not (optimizer.remembers or optimizer.weight_decay or optimizer.clip_norm or optimizer.layers),
        is_flow=optimizer.flows,
        mean_coefficients=None if optimizer.remembers else -walk.summed_gradient / time,
        repeat=SameSteps(descent=setting.descent, step_sizes=tuple(walk.step_sizes), clippings=tuple(walk.clippings)),
    )


def start_pull(setting: Setting) -> Float[Tensor, "point out"]:
    """J(θ_0)·θ_0 at all points, where weights decay; zeros where nobody asks."""
    if not setting.experiment.optimizer.weight_decay:
        return torch.zeros_like(setting.outputs)
    points = setting.points
    tapes = (points.tape(setting.weights, block) for block in points.train_blocks + points.other_blocks)
    return torch.cat([points.reader.tangent(tape).applied(setting.weights) for tape in tapes])


def sizes(walk: Walk) -> dict[str, Region]:
    """Where each split lies, and the size of what rounds there."""
    setting = walk.setting
    found = {}
    for name, place in setting.places.items():
        inputs = setting.points.inputs[place]
        norms = [setting.module.sizes(weights, inputs) for weights in (setting.weights, walk.weights)]
        found[name] = Region(place, torch.cat(norms))
    return found


def known(walk: Walk, rule: str) -> dict[str, float]:
    """What can be said of the contributions by a rule, with their error relative to ‖𝒮‖ where that is known."""
    setting, integrals = walk.setting, walk.ledger.integrals[rule]
    read, train = setting.attributed, setting.points.train
    kernel, contributions = integrals.kernel[read], integrals.contributions[read]
    if not (kernel.isfinite().all() and contributions.isfinite().all()):
        return {}
    found = summary(kernel, contributions, train if int((read < train).sum()) == train else 0)
    if setting.experiment.optimizer.weight_decay:
        decay = integrals.decay[read]
        found["decay_share"] = float(decay.norm() / (contributions.sum(2) + decay).norm())
    if (error := walk.ledger.error(rule, walk.step)) is not None:
        found["error_bar"] = share(error.parts, contributions)
        if error.sums is not None:
            found["sum_error_bar"] = share(error.sums, contributions.sum(2) + integrals.decay[read])
    if setting.experiment.optimizer.flows and walk.memory:
        arcs = walk.memory["controller"]
        found["flow_error"] = float(arcs["error"] / arcs["way"])
    return found


def share(error: float, whole: Tensor) -> float:
    """An error relative to the norm of what it is the error of."""
    size = float(whole.norm())
    return error / size if size else float("nan")
