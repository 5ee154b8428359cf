"""Scalar functions of one number: tangent kernels, descent steps,
and the kernel of a finite step.

The claims are from F. Huszár, "Some intuition on the neural tangent kernel" (2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Annotated

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.look import CONTROL, MAIN
from ntkexp.claim.trial import AbstractTrial, NetworkTrial, Rows
from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource
from ntkexp.library import ascend, finite_step_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.scalar import AbstractScalar
from ntkexp.records.sweep import Level
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream
from ntkexp.text import listed

ROUNDING = 1e-9
"""A value counts as unchanged if its change is smaller than this fraction of the change
of f at the observation x′. """

Integer = Annotated[int, Field(ge=-(10**4), le=10**4)]


class ScalarCurve(AbstractTrial):
    """The kernel of a scalar function f with an observation x′,
    and a descent step on this observation.

    The points x are the integers from `first` to `last`. The observation (x′, y′) is
    (`observed`, `value`). There is a row for each x:

        share        k(x, x′)/k(x′, x′) for the tangent kernel k
        finite       k̃(x, x′)/k(x′, x′), where k̃ is the kernel of a finite step with η = `ascent`
        before       f(x) before a descent step on (f(x′) − y′)² with η = `step_size`
        after        f(x) after this step
        moved        after − before
        wrong_way    1 if f(x) and f(x′) change in opposite directions, else 0
        error        |k(x, x′) − (delta·[x = x′] + product·x x′ + constant)|/k(x′, x′)

    These numbers are the same in all rows of a curve:

        least, least_at, largest, largest_at    the extremes of share, and their x
        spread               largest − least
        finite_largest_at    the x of the maximum of finite
        fastest              the index of the parameter with the largest |∂f(x′)/∂θ|, from 1

    These columns label the rows:

        x           the point
        place       observed or elsewhere
        side        left or right of `boundary`
        ascended    the number of ascent steps on f(x′) before the measurement
        start       given: the model's own weights; drawn: these weights + scatter·N(0, 1)
    """

    model: AbstractScalar
    first: Integer = -10
    last: Integer = 20
    observed: Integer = 10
    value: float = 50.0
    step_size: float = Field(0.1, gt=0)
    scatter: float = Field(1.0, gt=0)
    boundary: float = -0.1
    delta: float = 0.0
    product: float = 0.0
    constant: float = 0.0
    ascended: tuple[CountOrNone, ...] = (0,)
    ascent: float = Field(1.0, gt=0)

    def rows(self, seed: int) -> Rows:
        if not self.first <= self.observed <= self.last:
            raise Mistake(
                f"trial.observed={self.observed} is not in {self.first} … {self.last}"
            )
        module = self.model.function()
        own = weights_of(module)
        generator = stream("weights", seed)
        moved = {
            name: weight + self.scatter * noise_like(weight, generator)
            for name, weight in own.items()
        }
        x = torch.arange(self.first, self.last + 1, dtype=torch.float64)[:, None]
        here = self.observed - self.first
        for start, weights in {"given": own, "drawn": moved}.items():
            for steps in self.ascended:
                reached = ascend(
                    module, x[here : here + 1], steps, self.ascent, weights=weights
                )
                for row in self.curve(module, reached, x, here):
                    yield {"start": start, "ascended": steps, **row}

    def curve(
        self, module: nn.Module, weights: Weights, x: Tensor, here: int
    ) -> Iterator[dict[str, Level]]:
        """Yield the rows for all points x, at the given weights. `here` is the index of
        the observation x′ in `x`."""
        point = x[here : here + 1]
        kernel = tangent_kernel(module, x, point, weights=weights)[:, 0, 0, 0]
        finite = finite_step_kernel(module, x, point, self.ascent, weights=weights)
        share = kernel / kernel[here]
        finite_share = finite[:, 0, 0, 0] / kernel[here]

        # A descent step on (f(x′) − y′)² is an ascent step on f(x′)
        # with η′ = −2η (f(x′) − y′).
        function = function_of(module)
        before = function(weights, x)[:, 0]
        size = 2 * self.step_size * (self.value - before[here]).item()
        after = function(ascend(module, point, 1, size, weights=weights), x)[:, 0]
        moved = after - before

        # The formula of the kernel: delta·[x = x′] + product·x x′ + constant
        formula = self.product * x[:, 0] * self.observed + self.constant
        formula[here] += self.delta
        summary: dict[str, Level] = {
            "least": share.min().item(),
            "least_at": x[share.argmin()].item(),
            "largest": share.max().item(),
            "largest_at": x[share.argmax()].item(),
            "finite_largest_at": x[finite_share.argmax()].item(),
            "spread": (share.max() - share.min()).item(),
            "fastest": 1 + fastest_parameter(function, weights, point),
        }
        for k, position in enumerate(x[:, 0].tolist()):
            yield {
                "x": int(position),
                "place": "observed" if k == here else "elsewhere",
                "side": "left" if position < self.boundary else "right",
                "kernel": kernel[k].item(),
                "share": share[k].item(),
                "finite": finite_share[k].item(),
                **summary,
                "before": before[k].item(),
                "after": after[k].item(),
                "moved": moved[k].item(),
                "wrong_way": float((moved[k] / moved[here]).item() < -ROUNDING),
                "error": ((kernel[k] - formula[k]).abs() / kernel[here]).item(),
            }


def fastest_parameter(function: Function, weights: Weights, point: Tensor) -> int:
    """Return the index of the parameter with the largest |∂f/∂θ| at a point."""
    gradient = torch.func.grad(lambda weights: function(weights, point).sum())(
        dict(weights)
    )
    slopes = torch.cat([gradient[name].flatten() for name in weights])
    return int(slopes.abs().argmax())


class FiniteStepPeaks(ScalarCurve):
    """A scalar function, with the positions of the maxima of its finite-step kernels.

    In addition to the rows of `ScalarCurve`, there is a row for each step size `eta`:

        peak_at    the x of the maximum of k̃(x, x′) for a step with η = `eta`
    """

    etas: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1)

    def curve(
        self, module: nn.Module, weights: Weights, x: Tensor, here: int
    ) -> Iterator[dict[str, Level]]:
        yield from super().curve(module, weights, x, here)
        point = x[here : here + 1]
        for eta in self.etas:
            finite = finite_step_kernel(module, x, point, eta, weights=weights)[
                :, 0, 0, 0
            ]
            yield {"eta": eta, "peak_at": x[finite.argmax()].item()}


def noise_like(weight: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


class FiniteSteps(NetworkTrial):
    """The kernel k̃_η of a finite step compared with the tangent kernel k,
    by step size.

        error            ‖k̃_η − k‖/‖k‖, between `points` points and `observed` training examples
        centred_error    ‖(k̃_η + k̃_{−η})/2 − k‖/‖k‖, where errors of first order in η cancel
        other_error      ‖k̃_η − k′‖/‖k′‖, with the tangent kernel k′ at other weights (a control)

    The seed draws the weights of a network. In addition, scatter·N(0, 1) is added to
    the weights, for functions whose weights are fixed."""

    step_sizes: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 0.03, 0.01), min_length=2
    )
    points: Count = 16
    observed: Count = 4
    scatter: float = Field(0.0, ge=0)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        generator = stream("weights", seed)
        module = self.model.module(
            self.init, tuple(data.train.inputs.shape[1:]), 1, generator, data.vocabulary
        ).eval()
        weights = {
            name: weight + self.scatter * noise_like(weight, generator)
            for name, weight in weights_of(module).items()
        }
        seen = torch.cat([data.train.inputs, data.query.inputs, data.test.inputs])[
            : self.points
        ]
        observed = data.train.inputs[: self.observed]
        tangent = tangent_kernel(module, seen, observed, weights=weights)
        elsewhere = {
            name: weight + noise_like(weight, generator)
            for name, weight in weights.items()
        }
        other = tangent_kernel(module, seen, observed, weights=elsewhere)

        def error(kernel: Tensor, limit: Tensor) -> float:
            return float((kernel - limit).norm() / limit.norm())

        # The error is O(η), and the error of the average over ±η is O(η²).
        for eta in self.step_sizes:
            finite, back = (
                finite_step_kernel(module, seen, observed, size, weights=weights)
                for size in (eta, -eta)
            )
            yield {
                "step_size": eta,
                "error": error(finite, tangent),
                "centred_error": error((finite + back) / 2, tangent),
                "other_error": error(finite, other),
            }


class Reparametrised(AbstractTrial):
    """The change of a tanh network's outputs and tangent kernel
    under reparametrisation.

        outputs    ‖f′ − f‖/‖f‖
        change     ‖K′ − K‖/‖K‖

        spelling       parametrisation of a layer
        weight_norm    W = g v/‖v‖, row by row (T. Salimans & D. Kingma 2016, arXiv:1602.07868)
        batch_norm     hidden outputs are normalised; a new scale and shift undo the normalisation
        rotation       W = Q V with a fixed orthogonal Q, which leaves the kernel unchanged (a
                       control)

    The kernel is computed among the training examples of the data.
    """

    data: AbstractSource
    width: Count = 64
    depth: Count = 2

    def rows(self, seed: int) -> Rows:
        x = self.data.split(seed).train.inputs.flatten(1)
        generator = stream("weights", seed)
        sizes = (x.shape[1], *(self.width,) * self.depth, 1)
        layers = [
            layer
            for one, other in pairwise(sizes)
            for layer in (nn.Linear(one, other), nn.Tanh())
        ]
        plain = nn.Sequential(*layers[:-1]).double()
        with torch.no_grad():
            for weight in plain.parameters():
                weight.copy_(
                    torch.randn(weight.shape, generator=generator).double()
                    / weight.shape[-1] ** 0.5
                )

        kernel = tangent_kernel(plain, x)
        outputs = plain(x).detach()
        spellings = {
            "weight_norm": weight_normed(plain),
            "batch_norm": batch_normed(plain, x),
            "rotation": rotated(plain, generator),
        }
        for spelling, module in spellings.items():
            change = (tangent_kernel(module, x) - kernel).norm() / kernel.norm()
            change_of_outputs = (module(x).detach() - outputs).norm() / outputs.norm()
            yield {
                "spelling": spelling,
                "outputs": change_of_outputs.item(),
                "change": change.item(),
            }


def weight_normed(plain: nn.Sequential) -> nn.Sequential:
    """Return a copy of the network with weights W = g v/‖v‖."""
    network = deepcopy(plain)
    for layer in network:
        if isinstance(layer, nn.Linear):
            weight_norm(layer)
    return network


def rotated(plain: nn.Sequential, generator: torch.Generator) -> nn.Sequential:
    """Return a copy of the network with weights W = Q V for random orthogonal Q."""
    network = deepcopy(plain)
    for layer in network:
        if isinstance(layer, nn.Linear):
            size = layer.out_features
            square = torch.randn(size, size, generator=generator).double()
            register_parametrization(
                layer, "weight", Rotated(torch.linalg.qr(square).Q)
            )
    return network


def batch_normed(plain: nn.Sequential, x: Tensor) -> nn.Sequential:
    """Return a copy with BatchNorm in evaluation mode after each hidden linear layer.

    Statistics come from `x`; scale and shift undo the normalisation,
    so that f does not change."""
    network = nn.Sequential()
    *hidden, readout = deepcopy(plain)
    for layer in hidden:
        network.append(layer)
        if not isinstance(layer, nn.Linear):
            continue
        norm = nn.BatchNorm1d(layer.out_features).double()
        with torch.no_grad():
            values = network(x)
            norm.running_mean = values.mean(0)
            norm.running_var = values.var(0, correction=0)
            norm.weight.copy_((norm.running_var + norm.eps).sqrt())
            norm.bias.copy_(norm.running_mean)
        network.append(norm.eval())
    return network.append(readout)


class Rotated(nn.Module):
    """The parametrisation W = Q V with a fixed orthogonal matrix Q."""

    def __init__(self, rotation: Tensor) -> None:
        super().__init__()
        self.rotation = nn.Buffer(rotation)

    def forward(self, weight: Tensor) -> Tensor:
        # V → W
        return self.rotation @ weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        # W → V
        return self.rotation.t() @ weight


class ScalarStep(AbstractPicture):
    """A scalar function before and after a step on an observation, and its kernel.

    The picture shows a trial of `ScalarCurve`. With `finite`, it also shows the kernel
    of a finite step. If `control` is a name, it also shows the kernel of the control
    look under this name.

    The axes follow F. Huszár, "Some intuition on the neural tangent kernel" (2020):
    f(x), and k(x, x′)/k(x′, x′)."""

    finite: bool = False
    control: str = ""

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_scalar_step  # noqa: PLC0415  loads matplotlib

        trial = curve(judged)
        rows = given(judged)
        kernels = [("tangent kernel", rows["share"])]
        if self.finite:
            kernels.append((f"step of {spelled(trial.ascent)}", rows["finite"]))
        if self.control:
            kernels.append((self.control, given(judged, CONTROL)["share"]))
        return draw_scalar_step(
            rows, (trial.observed, trial.value), kernels, moved(rows, trial)
        )

    def here(self, judged: JudgedClaim) -> str:
        trial = curve(judged)
        rows = given(judged)
        here = trial.observed
        share = rows.set_index("x")["share"]
        finite = ""
        if self.finite:
            largest_at = spelled(rows["finite_largest_at"].iloc[0])
            finite = f" The kernel of the finite step is largest at x = {largest_at}."
        return (
            f"a step of descent has η = {spelled(trial.step_size)}; k(x, {here})/k({here}, {here}) "
            f"is least {at(share, share.min())}, and largest {at(share, share.max())}.{finite}"
        )


def curve(judged: JudgedClaim, look: str = MAIN) -> ScalarCurve:
    """Return the settings of the trial that this look (statistical test) measures.
    Raise unless it is a `ScalarCurve`."""
    trial = judged.looks[look].trial
    if not isinstance(trial, ScalarCurve):
        raise Mistake(
            "picture: it draws what ntkexp.claim.papers.ScalarCurve measures; "
            "give the claim such a trial"
        )
    return trial


def given(judged: JudgedClaim, look: str = MAIN) -> pd.DataFrame:
    """Return the rows at the model's own weights, before any ascent."""
    rows = ascents(judged, look)
    curve: pd.DataFrame = rows[rows["ascended"] == 0].reset_index(drop=True)
    return curve


def moved(rows: pd.DataFrame, trial: ScalarCurve) -> str:
    """Describe how the descent step changes the function,
    at the observation and elsewhere, as text."""
    here = rows[rows["place"] == "observed"].iloc[0]
    others = rows[rows["place"] != "observed"]
    moving = others[others["moved"].abs() > ROUNDING * abs(here["moved"])]
    against = int(moving["wrong_way"].sum())
    many = {0: "none", len(others): "all"}.get(len(moving), f"{len(moving)}")
    ways = f", {against} of them the other way" if against else ""
    return (
        f"A step on ({trial.observed}, {spelled(trial.value)}) moves f({trial.observed}) from "
        f"{spelled(here['before'])} to {spelled(here['after'])}, "
        f"and {many} of the {len(others)} other values{ways}"
    )


def at(share: pd.Series[float], extreme: float) -> str:
    """Describe the position and value of an extreme of `share`, as text.

    >>> at(pd.Series([0.0, 0.0, 1.0], index=[3, 4, 5]), 0.0)
    'at 2 places, 0'
    >>> at(pd.Series([1.0, -0.27851], index=[-1, 2]), -0.27851)
    'at x = 2, −0.279'
    """
    positions = share.index[(share - extreme).abs() <= ROUNDING]
    where = (
        f"x = {spelled(positions[0])}"
        if len(positions) == 1
        else f"{len(positions)} places"
    )
    return f"at {where}, {spelled(extreme)}"


def spelled(value: float) -> str:
    """Format a number with up to three decimals.

    >>> spelled(-0.27851), spelled(50.0), spelled(35.6)
    ('−0.279', '50', '35.6')
    """
    return f"{round(float(value), 3) + 0.0:.10g}".replace("-", "−")


class ScalarTraining(AbstractPicture):
    """A scalar function and its kernel with x′,
    after several numbers of ascent steps on f(x′).

    The picture shows a trial of `ScalarCurve` with several numbers of steps
    in `ascended`.

    The axes follow F. Huszár, "Some intuition on the neural tangent kernel" (2020):
    f(x), and k(x, x′)/k(x′, x′)."""

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_scalar_training  # noqa: PLC0415  loads matplotlib

        return draw_scalar_training(
            ascents(judged), curve(judged).observed, changed_range(ascents(judged))
        )

    def here(self, judged: JudgedClaim) -> str:
        trial = curve(judged)
        rows = ascents(judged)
        spread = rows.groupby("ascended")["share"].agg(
            lambda share: share.max() - share.min()
        )
        narrower = bool((spread.diff().dropna() < 0).all())
        way = "narrower each time" if narrower else "not narrower each time"
        steps = listed([str(steps) for steps in spread.index])
        wide = ", ".join(map(spelled, spread))
        return (
            f"steps of η = {spelled(trial.ascent)} raise f({trial.observed}); the curves are those "
            f"after {steps} steps. The range of the kernel is {way}: {wide} wide."
        )


def ascents(judged: JudgedClaim, look: str = MAIN) -> pd.DataFrame:
    """Return the rows of the trials that started from the model's own weights, for
    every number of ascent steps.

    These rows are the same for every seed, so return the rows of one seed.
    """
    rows = judged.rows("x", "share", "finite", "before", "after", look=look)
    chosen = (rows["start"] == "given") & (rows["seed"] == rows["seed"].min())
    curves: pd.DataFrame = rows.loc[chosen].sort_values(["ascended", "x"])
    return curves.reset_index(drop=True)


def changed_range(rows: pd.DataFrame) -> str:
    """Describe the ranges of k(x, x′)/k(x′, x′) after the fewest
    and the most ascent steps, as text."""
    first = rows["ascended"].min()
    last = rows["ascended"].max()
    ranges = []
    for steps in (first, last):
        share = rows.loc[rows["ascended"] == steps, "share"]
        ranges.append(f"{spelled(share.min())} … {spelled(share.max())}")
    return f"From {first} to {last} steps, the kernel goes from a range of {ranges[0]} to {ranges[1]}"
