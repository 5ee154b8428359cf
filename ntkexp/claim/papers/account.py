"""Contributions of single examples at finite step size: by step, by step size,
and by width.

In this file, 𝒮(x, xᵢ) is the contribution of training example xᵢ to f_T(x) − f_0(x) by
the secant rule. The networks have one output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import grad, jacrev, jvp

from ntkexp.claim.papers.leaving_out import BARE, Retraining, retraining
from ntkexp.claim.papers.path_kernel import AbstractPathQuantity, top_shares
from ntkexp.claim.quantity import Measured
from ntkexp.claim.trial import AbstractTrial, Rows
from ntkexp.component import Count
from ntkexp.config.compose import compose
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.effects.trajectory import flat_like
from ntkexp.model.functional import function_of
from ntkexp.path.integrals import integrals_at_zero
from ntkexp.path.rule.base import Gauss, Secant, Substep
from ntkexp.path.step import Step
from ntkexp.removal.rerun import WEIGHTS, retrain
from ntkexp.report.analysis.rank_correlation import mean_known, spearman
from ntkexp.report.run import Run
from ntkexp.run.setting import Setting, prepare
from ntkexp.shapes import Weights
from ntkexp.statistics import largest_eigenvalue
from ntkexp.stream import normal, stream


class WidthDisagreement(AbstractPathQuantity):
    """The disagreement of contributions between networks of neighbouring widths.

    The widths are the values of the axis `along`. Rows have

        1 − ρ,    ρ = mean over x of the Spearman correlation over i of 𝒮ₙ(x, xᵢ) and 𝒮ₘ(x, xᵢ)

    for each width n except the largest, where m is the next larger width. x are the
    points of a split. Both networks learn the same examples, and draw their weights
    independently."""

    along: str = "model.width"

    def of(self, measured: Measured) -> pd.DataFrame:
        rows = []
        for (name, seed), group in measured.table.groupby(["runs", "seed"], sort=False):
            ordered = group.sort_values(self.along)
            runs = [measured.known.get(folder) for folder in ordered["run"]]
            widths = ordered[self.along].tolist()
            for width, (narrow, wide) in zip(widths, pairwise(runs), strict=False):
                value = nan
                if narrow is not None and wide is not None:
                    value = self.disagreement(narrow, wide)
                rows.append(
                    {"runs": name, "seed": seed, self.along: width, "value": value}
                )
        return pd.DataFrame(rows)

    def disagreement(self, narrow: Run, wide: Run) -> float:
        """Return 1 − ρ for two runs."""
        contributions = [self.contributions(run)[:, 0].T for run in (narrow, wide)]
        return 1 - mean_known(spearman(*contributions))


class FiniteStepTerm(AbstractTrial):
    """The part of contributions that is due to finite steps, compared with implicit
    gradient regularisation.

    For gradient descent with step size η, this part is

        D(x, xᵢ) = 𝒮(x, xᵢ) − 𝒮_left(x, xᵢ)

    where 𝒮_left uses the tangent Jacobian J_s(x) at the start of each step. Gradient
    descent nearly follows the gradient flow of L + (η/4)‖∇L‖², where L = Σᵢ Lᵢ is the
    loss. The second term regularises L. It changes the output at x by Σᵢ R(x, xᵢ):

        R(x, xᵢ) = −(η²/2) Σ_s J_s(x) ∇²Lᵢ ∇L,       Σᵢ ∇²Lᵢ ∇L = ½ ∇‖∇L‖²
        B(x, xᵢ) = (η/2) (J_0(x) ∇Lᵢ(θ_0) − J_T(x) ∇Lᵢ(θ_T))

    For smooth networks, D = R + B + O(η²):

        D = (η²/2) Σ_s ∇Lᵢᵀ ∇²f(x) ∇L + O(η²)        at first order, J̄ − J_s = −(η/2) ∇²f(x) ∇L
        D − R = (η²/2) Σ_s (∇Lᵢᵀ ∇²f(x) + J_s(x) ∇²Lᵢ) ∇L + O(η²)
              = −(η/2) × (change of J(x) ∇Lᵢ over the path) + O(η²) = B + O(η²)

    With B, the left sum becomes the trapezoidal rule, which integrates the tangent
    kernel along the path with error O(η²).

        alone       ‖D − R‖/‖D‖, over points x outside the training set and examples i
        with_ends   ‖D − R − B‖/‖D‖

    The column `step_size` holds η as a fraction of the largest stable step size. All
    trainings last as long as `steps` steps of the largest fraction.

    D. Barrett & B. Dherin, "Implicit gradient regularization" (2021), arXiv:2009.11162.
    """

    base: tuple[str, ...]
    fractions: tuple[float, ...] = Field(min_length=2)
    steps: Count = 8

    def rows(self, seed: int) -> Rows:
        for fraction in self.fractions:
            steps = round(self.steps * max(self.fractions) / fraction)
            words = [f"optimizer.stable_fraction={fraction}", f"steps={steps}"]
            rules = "path.rule=[secant,left]"
            retrained = retraining([*self.base, *words, rules, *BARE], seed)
            parts = finite_step_parts(retrained)
            rest = parts.term - parts.regularisation  # D − R
            size = parts.term.norm()
            yield {
                "step_size": fraction,
                "alone": float(rest.norm() / size),
                "with_ends": float((rest - parts.ends).norm() / size),
            }


class FiniteStepParts(NamedTuple):
    """D, R and B of `FiniteStepTerm`."""

    term: Float[Tensor, "point train"]
    regularisation: Float[Tensor, "point train"]
    ends: Float[Tensor, "point train"]


def finite_step_parts(retrained: Retraining) -> FiniteStepParts:
    """Return D, R and B of a training by gradient descent, at the points outside the
    training set. The training must have `path.rule=[secant,left]`."""
    load_forward_mode()
    rerun = retrained.rerun
    size = retrained.setting.descent.step_size
    weight = retrained.setting.descent.weight(retrained.train)

    def jacobian(vector: Tensor, inputs: Tensor) -> Float[Tensor, "point weight"]:
        rows: Tensor = jacrev(lambda v: rerun.outputs(v, inputs)[:, 0])(vector)
        return rows

    def gradients(vector: Tensor) -> Float[Tensor, "train weight"]:
        """Return ∇Lᵢ = w ℓ′ᵢ J(xᵢ)."""
        outputs = rerun.outputs(vector, rerun.inputs)
        slopes = weight * rerun.loss.output_gradient(outputs, rerun.targets)
        return slopes * jacobian(vector, rerun.inputs)

    matrices = retrained.outcome.matrices
    term = (
        matrices.query_contributions("secant") - matrices.query_contributions("left")
    )[:, 0]
    others = retrained.others
    vector = rerun.flat.vector(rerun.start)
    first = jacobian(vector, others) @ gradients(vector).t()
    regularisation = torch.zeros_like(term)
    for step in retrain(rerun, rerun.unit_weights[None]):
        vector = step.recorded[WEIGHTS][0]
        # ∇L = (θ_s − θ_{s+1})/η, and the derivatives ∇²Lᵢ ∇L of all ∇Lᵢ along ∇L
        gradient = (vector - step.weights[0]) / size
        curvatures: Tensor = jvp(gradients, (vector,), (gradient,))[1]
        regularisation -= size**2 / 2 * jacobian(vector, others) @ curvatures.t()
        vector = step.weights[0]
    last = jacobian(vector, others) @ gradients(vector).t()
    return FiniteStepParts(term, regularisation, size / 2 * (first - last))


class RisingSteps(AbstractTrial):
    """The concentration of contributions in steps that raise the loss, compared with
    other steps.

    A step of gradient descent raises the loss if and only if the curvature along its
    gradient g, averaged over the step, exceeds 2/η:

        L(θ − ηg) − L(θ) = −η‖g‖² + (η²/2) gᵀH̄g,    H̄ = 2 ∫₀¹ (1 − u) ∇²L(θ − uηg) du

    So these are the steps beyond the edge of stability. There is a row for each `kind`
    of steps, `rising` and `falling`:

        top_share    Σ|Δ𝒮(x, xᵢ)| over the tenth of the examples with the largest |Δ𝒮| / Σ|Δ𝒮| over
                     all examples, where Δ𝒮 is the contribution of one step; mean over points x
                     outside the training set
        steps        the number of measured steps of this kind

    Every `every`-th step is measured, from the first rising step on. Training changes
    slowly, so steps are only compared within windows of `window` steps. In each window
    with steps of both kinds, the shares of each kind are averaged. `top_share` is the
    mean of these averages, or NaN if there is no such window.

    E. Rosenfeld & A. Risteski, "Outliers with opposing signals have an outsized effect
    on neural network optimization" (2023), arXiv:2311.04163."""

    base: tuple[str, ...]
    every: Count = 5
    window: Count = 100

    def rows(self, seed: int) -> Rows:
        setting = prepare(compose([*self.base, *BARE, f"seed={seed}", "threads=1"]))
        steps = pd.DataFrame(
            measured_steps(setting, self.every), columns=list(MeasuredStep._fields)
        )
        # the mean of each kind in each window that has both kinds
        means = steps.pivot_table(
            values="top_share", index=steps["step"] // self.window, columns="rising"
        ).dropna()
        for kind, rising in (("rising", True), ("falling", False)):
            share = float(means[rising].mean()) if len(means.columns) == 2 else nan
            count = int((steps["rising"] == rising).sum())
            yield {"kind": kind, "top_share": share, "steps": count}


class MeasuredStep(NamedTuple):
    """A step, whether it raises the loss, and the share of the tenth of the examples
    with the largest contributions."""

    step: int
    rising: bool
    top_share: float


def measured_steps(setting: Setting, every: int) -> Iterator[MeasuredStep]:
    """Train, and yield every `every`-th step, beginning with the first step that raises
    the loss."""
    descent = setting.descent
    tenth = max(1, setting.problem.train // 10)
    begun = False
    for step, following in pairwise(descent.steps_from(setting.problem.weights)):
        before, after = (
            float(descent.loss.value(view.train_outputs, descent.targets).sum())
            for view in (step.view, following.view)
        )
        rising = after > before
        begun = begun or rising
        if begun and step.index % every == 0:
            parts, _ = step_contributions(setting, step, SECANT)
            share = float(top_shares(parts.numpy(), tenth).mean())
            yield MeasuredStep(step.index, rising, share)


class PartsAtTheEdge(AbstractTrial):
    """The error of single contributions before and after the sharpness exceeds 2/η.

    The sharpness λ is the largest eigenvalue of the Hessian of the loss. At a fixed
    step size η it rises during training, until it exceeds 2/η and stays near it. The
    first `window` of every `every` steps are measured. There is a row for each `stage`:

        before    steps with 0.8 < λη/2 ≤ 1, before λ exceeds 2/η for the first time
        after     the next `later` steps

    Δ𝒮 is the contribution of one example in one step at one point x outside the training
    set. Δ𝒮* is the same contribution with the exact mean Jacobian of the step, by four
    Gauss–Legendre points. Δf is the change of the output at x. Sums are over the steps
    of the stage, points and examples.

        parts           √(Σ(Δ𝒮 − Δ𝒮*)²/ΣΔ𝒮*²)
        cancellation    Σ|Δ𝒮|/Σ|Σᵢ Δ𝒮|, with Σᵢ over examples
        sum             √(Σ(Σᵢ Δ𝒮 − Δf)²/ΣΔf²)
        stability       the mean of λη/2

    A stage without steps has NaN. Both stages are empty if λ exceeds 2/η never, or less
    than `later` steps before the end.

    With `slower`, the network is trained again with η/`slower`, and measured at the
    same training times. Then λ may stay below 2 `slower`/η.

    J. Cohen et al., "Gradient descent on neural networks typically occurs at the edge
    of stability" (2021), arXiv:2103.00065."""

    base: tuple[str, ...]
    every: Count = 20
    window: Count = 5
    later: Count = 1000
    slower: Count = 1

    def rows(self, seed: int) -> Rows:
        setting = prepare(compose([*self.base, *BARE, f"seed={seed}", "threads=1"]))
        stages = self.stages(setting)
        measured = list(measured_parts(setting, stages, self.window, self.slower))
        table = pd.DataFrame(measured, columns=list(MeasuredParts._fields))
        for stage in ("before", "after"):
            steps = table[table["stage"] == stage]
            total = {name: float(steps[name].sum()) for name in SUMS}
            numbers = dict.fromkeys(("parts", "cancellation", "sum", "stability"), nan)
            if len(steps):
                numbers = {
                    "parts": (total["wrong"] / total["squares"]) ** 0.5,
                    "cancellation": total["mass"] / total["net"],
                    "sum": (total["missed"] / total["changed"]) ** 0.5,
                    "stability": float(steps["stability"].mean()),
                }
            yield {"stage": stage, "steps": len(steps), **numbers}

    def stages(self, setting: Setting) -> dict[int, str]:
        """Return the first step of each window, with its stage. Return no window if the
        sharpness does not exceed 2/η early enough."""
        stages: dict[int, str] = {}
        last = setting.descent.steps - self.later
        for step in setting.descent.steps_from(setting.problem.weights):
            if step.index > last:
                break
            if step.index % self.every:
                continue
            stability = step.step_size * sharpness(setting, step.view.weights) / 2
            if stability > 1:
                after = range(step.index, step.index + self.later, self.every)
                return stages | dict.fromkeys(after, "after")
            if stability > 0.8:
                stages[step.index] = "before"
        return {}


class MeasuredParts(NamedTuple):
    """Sums over the contributions of one step, as `PartsAtTheEdge` defines them."""

    stage: str
    stability: float  # λη/2 at the beginning of the window
    squares: float  # ΣΔ𝒮*²
    wrong: float  # Σ(Δ𝒮 − Δ𝒮*)²
    mass: float  # Σ|Δ𝒮|
    net: float  # Σ|Σᵢ Δ𝒮|
    changed: float  # ΣΔf²
    missed: float  # Σ(Σᵢ Δ𝒮 − Δf)²


SUMS = MeasuredParts._fields[2:]


def measured_parts(
    setting: Setting, stages: Mapping[int, str], window: int, slower: int
) -> Iterator[MeasuredParts]:
    """Train with the step size divided by `slower`, and yield the measured steps.

    `stages` maps the first step of each window, at the original step size,
    to its stage."""
    if not stages:
        return
    descent = replace(
        setting.descent,
        step_size=setting.descent.step_size / slower,
        steps=setting.descent.steps * slower,
    )
    last = max(stages) * slower + window
    begun = -window  # the first step of the current window
    stage = ""
    stability = nan
    for step in descent.steps_from(setting.problem.weights):
        time, between = divmod(step.index, slower)
        if between == 0 and time in stages:
            begun = step.index
            stage = stages[time]
            stability = step.step_size * sharpness(setting, step.view.weights) / 2
        if step.index >= last:
            return
        if step.index < begun + window:
            parts, change = step_contributions(setting, step, SECANT)
            exact, _ = step_contributions(setting, step, GAUSS)
            yield MeasuredParts(
                stage=stage,
                stability=stability,
                squares=float(exact.square().sum()),
                wrong=float((parts - exact).square().sum()),
                mass=float(parts.abs().sum()),
                net=float(parts.sum(1).abs().sum()),
                changed=float(change.square().sum()),
                missed=float((parts.sum(1) - change).square().sum()),
            )


SECANT = Secant().quadrature(points=1, substeps=1, romberg=0)
GAUSS = Gauss().quadrature(points=4, substeps=1, romberg=0)


def step_contributions(
    setting: Setting, step: Step, quadrature: Sequence[Substep]
) -> tuple[Float[Tensor, "point train"], Float[Tensor, " point"]]:
    """Return the contributions of the examples in one step, and the changes of the
    outputs, at the points outside the training set."""
    domain = setting.domain
    integrals = integrals_at_zero(tuple(quadrature), domain)
    blocks = list(domain.blocks(step.segment))
    parts = torch.cat([integrals.add(step, block)[1] for block in blocks])
    changes = torch.cat([block.outputs(1.0) - block.outputs(0.0) for block in blocks])
    outside = slice(setting.problem.train - domain.first_point, None)
    return parts[outside, 0], changes[outside, 0]


def sharpness(setting: Setting, weights: Weights) -> float:
    """Return the largest eigenvalue of the Hessian of the loss."""
    load_forward_mode()
    descent = setting.descent
    train = setting.problem.train
    inputs = setting.problem.inputs[:train]
    function = function_of(setting.problem.module)
    flat = flat_like(weights)
    vector = flat.vector(weights)

    def loss(vector: Tensor) -> Tensor:
        outputs = function(flat.weights(vector), inputs)
        losses = descent.loss.value(outputs, descent.targets)
        return descent.weight(train) * losses.sum()

    start = normal(stream("sharpness", 0), flat.size)
    return largest_eigenvalue(
        lambda direction: jvp(grad(loss), (vector,), (direction,))[1], start.to(vector)
    )
