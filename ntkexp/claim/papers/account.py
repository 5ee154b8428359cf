"""Contributions of single examples at finite step size: by step, by step size,
and by width.

In this file, 𝒮(x, xᵢ) is the contribution of training example xᵢ to f_T(x) − f_0(x) by
the secant rule. The networks have one output."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import nan
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev, jvp

from ntkexp.claim.papers.leaving_out import BARE, Retraining, retraining
from ntkexp.claim.papers.path_kernel import AbstractPathQuantity, top_shares
from ntkexp.claim.quantity import Measured
from ntkexp.claim.trial import AbstractTrial, Rows
from ntkexp.component import Count
from ntkexp.config.compose import compose
from ntkexp.effects.curvature import load_forward_mode
from ntkexp.path.integrals import integrals_at_zero
from ntkexp.path.rule.base import Secant
from ntkexp.removal.rerun import WEIGHTS, retrain
from ntkexp.report.analysis.rank_correlation import mean_known, spearman
from ntkexp.report.run import Run
from ntkexp.run.setting import Setting, prepare


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

    For smooth networks, D = R + B + O(η²). B contains the two ends of the path. With B,
    the left sum becomes the trapezoidal rule. This rule integrates the tangent kernel
    along the path with error O(η²). To derive the equation, expand D to
    (η²/2) Σ_s ∇Lᵢᵀ ∇²f(x) ∇L, and subtract R. The difference is −(η/2) times the change
    of J(x) ∇Lᵢ in all steps.

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
            found = finite_step_parts(
                retraining([*self.base, *words, rules, *BARE], seed)
            )
            missed = found.term - found.regularisation
            size = found.term.norm()
            yield {
                "step_size": fraction,
                "alone": float(missed.norm() / size),
                "with_ends": float((missed - found.ends).norm() / size),
            }


class FiniteStepParts(NamedTuple):
    """D, R and B of `FiniteStepTerm`."""

    term: Float[Tensor, "point train"]
    regularisation: Float[Tensor, "point train"]
    ends: Float[Tensor, "point train"]


def finite_step_parts(retrained: Retraining) -> FiniteStepParts:
    """Return D, R and B of a training by gradient descent, at the points outside the
    training set. The training must have the contributions by both rules."""
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
            domain = setting.domain
            integrals = integrals_at_zero(Secant().quadrature(2, 1, 0), domain)
            blocks = domain.blocks(step.segment)
            parts = torch.cat([integrals.add(step, block)[1] for block in blocks])
            outside = parts[setting.problem.train - domain.first_point :, 0]
            share = float(top_shares(outside.numpy(), tenth).mean())
            yield MeasuredStep(step.index, rising, share)
