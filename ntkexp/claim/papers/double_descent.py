"""Double descent: test error as a function of the number of parameters.

The claim is from M. Belkin et al. 2019, arXiv:1812.11118.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.papers.wide_networks import network_of_width
from ntkexp.claim.trial import NetworkTrial, Row, Rows
from ntkexp.component import Count
from ntkexp.data.base import Data, Split
from ntkexp.effects.trajectory import flat_like
from ntkexp.mistake import Mistake
from ntkexp.model.base import LearningTask
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.networks import MLP
from ntkexp.stream import stream
from ntkexp.text import short

MAX_CONDITION = 1e12
"""Condition numbers are clipped to this value,
because larger ones are rounding noise."""


class WidthSweep(NetworkTrial):
    """Networks with one hidden layer, trained to convergence on noisy targets,
    by width.

        parameters     the number P of parameters
        test_error     mean (f − y)²/v on test points without noise; v is the variance of their y
        train_error    mean (f − y)²/v on the M training examples, with the same v
        condition      λ_max/λ_min of the initial kernel among training examples, at most 10¹²

    All widths learn the same examples, by Levenberg–Marquardt steps. Near P = M the
    kernel is nearly singular, and gradient descent would need too many steps.

    M. Belkin, D. Hsu, S. Ma & S. Mandal, "Reconciling modern machine-learning practice
    and the classical bias–variance trade-off" (2019), arXiv:1812.11118."""

    model: MLP
    widths: tuple[Count, ...] = Field(
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 40, 80), min_length=3
    )
    steps: Count = 60

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        if data.classes or data.train.target.shape[1] != 1:
            raise Mistake(
                "trial.data: choose data of one real value, such as ntkexp.data.Teacher"
            )
        return [self.row(seed, width, data) for width in self.widths]

    def row(self, seed: int, width: int, data: Data) -> Row:
        x = data.train.inputs
        task = LearningTask(tuple(x.shape[1:]), 1, data.vocabulary)
        module = network_of_width(
            width, self.model, self.init, task, stream("weights", seed, width)
        )
        function = function_of(module)
        start = weights_of(module)
        flat = flat_like(start)
        first = flat.vector(start)

        def residual(vector: Tensor, split: Split) -> Tensor:
            outputs = function(flat.weights(vector), split.inputs)[:, 0]
            return outputs - split.target.double()[:, 0]

        # w* = argmin ‖f(w; X) − y‖², and its mean squared errors
        minimum = least_squares(
            lambda vector: residual(vector, data.train), first, self.steps
        )
        with torch.no_grad():
            train_error = float(residual(minimum, data.train).square().mean())
            test_error = float(residual(minimum, data.test).square().mean())
        variance = float(data.test.target.double().var(correction=0))

        # the Jacobian of the outputs before training, which is that of the residuals
        jacobian = jacrev(lambda vector: residual(vector, data.train))(first)
        return {
            "width": width,
            "parameters": flat.size,
            "train_error": train_error / variance,
            "test_error": test_error / variance,
            "condition": condition(jacobian),
        }


def least_squares(
    residual: Callable[[Tensor], Float[Tensor, " train"]],
    start: Float[Tensor, " weight"],
    steps: int,
) -> Float[Tensor, " weight"]:
    """Minimise ‖r‖² by `steps` trial steps of the Levenberg–Marquardt method.

        w ← w − (JᵀJ + μ)⁻¹ Jᵀ r,    r = residual(w),  J = ∂r/∂w

    If a step lowers ‖r‖², accept it and decrease μ. Otherwise reject it and increase μ.

    >>> start = torch.tensor([1.0], dtype=torch.float64)
    >>> least_squares(lambda w: w**2 - 4.0, start, steps=30).round(decimals=9)
    tensor([2.], dtype=torch.float64)
    """
    here = start
    damping = 1e-2  # μ
    r = residual(here)
    jacobian = jacrev(residual)(here)
    for _ in range(steps):
        rows, columns = jacobian.shape
        # (JᵀJ + μ)⁻¹ Jᵀ = Jᵀ (JJᵀ + μ)⁻¹: solve the smaller system
        if rows < columns:
            gram = jacobian @ jacobian.t() + damping * torch.eye(
                rows, dtype=jacobian.dtype
            )
            step = jacobian.t() @ torch.linalg.solve(gram, r)
        else:
            gram = jacobian.t() @ jacobian + damping * torch.eye(
                columns, dtype=jacobian.dtype
            )
            step = torch.linalg.solve(gram, jacobian.t() @ r)
        after = residual(here - step)
        if after.square().sum() < r.square().sum():
            here = here - step
            damping = max(damping / 3, 1e-12)
            r = after
            jacobian = jacrev(residual)(here)
        else:
            damping = min(damping * 4, 1e12)
    return here.detach()


def condition(jacobian: Float[Tensor, "train weight"]) -> float:
    """Return the condition number of J Jᵀ for the Jacobian J, at most `MAX_CONDITION`.

    >>> condition(torch.tensor([[2.0, 0.0], [0.0, 1.0]])), condition(torch.ones(2, 1))
    (4.0, 1000000000000.0)
    """
    values = torch.linalg.svdvals(jacobian)
    if len(values) < len(jacobian) or values[-1] <= values[0] / MAX_CONDITION**0.5:
        return MAX_CONDITION
    return float((values[0] / values[-1]).square())


FITTED = 1e-3
"""Training examples count as fitted if the error is less than this share
of the variance."""


class InterpolationPeak(AbstractPicture):
    """Test error, train error and condition number against the number of parameters.

    The picture shows a trial of `WidthSweep`. `threshold` is the interpolation
    threshold, the number of targets (examples times outputs).

    The axes follow M. Belkin et al., "Reconciling modern machine-learning practice and
    the classical bias–variance trade-off" (2019), arXiv:1812.11118, figure 4."""

    threshold: float = Field(gt=0)

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_interpolation_peak  # noqa: PLC0415  loads matplotlib

        return draw_interpolation_peak(
            measured(judged), self.threshold, self.title(judged)
        )

    def title(self, judged: JudgedClaim) -> str:
        """Describe the peak of the mean test error,
        and its value at the largest network."""
        means = over_seeds(judged)["test_error"]
        top = means.idxmax()
        last = means.index[-1]
        fall = (
            "the largest number that was tried"
            if top == last
            else f"and falls to {short(means.iloc[-1])} at {last}"
        )
        return (
            f"The test error is largest at {top} parameters, {short(means.max())}, {fall}; "
            f"there are {short(self.threshold)} targets"
        )

    def here(self, judged: JudgedClaim) -> str:
        means = over_seeds(judged)
        fitted = means.index[means["train_error"] < FITTED]
        beyond = f"from {fitted[0]} parameters on" if len(fitted) else "nowhere"
        text = (
            "errors are shares of the targets' variance, "
            f"means over {measured(judged)['seed'].nunique()} seeds; "
            f"training examples are fitted, to {FITTED}, {beyond}."
        )

        # Find the smallest test errors below and above the interpolation threshold
        errors = means["test_error"]
        before = errors[errors.index < self.threshold]
        after = errors[errors.index > self.threshold]
        if before.empty or after.empty:
            return text
        how = "less" if after.min() < before.min() else "not less"
        return (
            f"{text} Below the threshold the test error is least at {before.idxmin()} parameters, "
            f"{short(before.min())}; beyond it is {how} than that: "
            f"{short(after.min())} at {after.idxmin()}."
        )


def measured(judged: JudgedClaim) -> pd.DataFrame:
    return judged.rows("parameters", "test_error", "train_error", "condition", "seed")


def over_seeds(judged: JudgedClaim) -> pd.DataFrame:
    """Return the test and train errors by number of parameters, averaged over seeds."""
    return measured(judged).groupby("parameters")[["test_error", "train_error"]].mean()
