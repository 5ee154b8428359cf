"""Functions of one number: their tangent kernel with an observation, what a step of descent does to them, and how the
kernel of a finite step differs from it (F. Huszár, "Some intuition on the neural tangent kernel", 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from ntkexp.claim.judged import AbstractPicture, JudgedClaim
from ntkexp.claim.look import CONTROL, MAIN
from ntkexp.claim.picture import draw_scalar_step, draw_scalar_training
from ntkexp.claim.trial import AbstractTrial
from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource
from ntkexp.init import AbstractInit
from ntkexp.library import ascend, finite_step_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.scalar import AbstractScalar
from ntkexp.records.sweep import Level
from ntkexp.shapes import Weights
from ntkexp.stream import stream
from ntkexp.text import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ROUNDING = 1e-9
"""A value that moves by a smaller share of f(x′)'s movement does not move."""


Whole = Annotated[int, Field(ge=-(10**4), le=10**4)]


class ScalarCurve(AbstractTrial):
    """The kernel of a function of one number with one observation x′, drawn over x, and what a step of descent does:

    A scalar function is looked at between `first` and `last`, with an observation (observed, value).

        share        k(x, x′)/k(x′, x′); `least` and `largest` are its extremes over x, `least_at` and `largest_at`
                     their x
        finite       the same of the kernel k̃ of a finite step, η = `ascent`; `finite_largest_at` is where that is
                     largest
        spread       largest − least
        fastest      which parameter changes f(x′) most, counted from 1: the largest ∣∂f(x′)/∂θ∣
        before       f(x) at the start                        after    f(x) after a step of η on (f(x′) − value)²
        moved        after − before                           wrong_way    1 where f(x) really moved against f(x′),
                     else 0
        error        |k(x, x′) − (delta·[x = x′] + product·x x′ + constant)|, as a share of k(x′, x′)

    Rows are told apart by `x`, which is the observation's `place` or elsewhere, on one `side` of the boundary; by
    the number of steps `ascended` that raise f(x′) before all this; and by the `start`: `given`, which is the
    model's own, or `drawn`, which has scatter·N(0, 1) added to every parameter (Huszár 2020).
    """

    model: AbstractScalar
    first: Whole = -10
    last: Whole = 20
    observed: Whole = 10
    value: float = 50.0
    step_size: float = Field(0.1, gt=0)
    scatter: float = Field(1.0, gt=0)
    boundary: float = -0.1
    delta: float = 0.0
    product: float = 0.0
    constant: float = 0.0
    ascended: tuple[CountOrNone, ...] = (0,)
    ascent: float = Field(1.0, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        if not self.first <= self.observed <= self.last:
            raise Mistake(f"trial.observed={self.observed} is not in {self.first} … {self.last}")
        module = self.model.function()
        own, generator = weights_of(module), stream("weights", seed)
        moved = {
            name: weight + self.scatter * noise_like(weight, generator)
            for name, weight in own.items()
        }
        x = torch.arange(self.first, self.last + 1, dtype=torch.float64)[:, None]
        here = self.observed - self.first
        rows: list[Mapping[str, Level]] = []
        for start, weights in {"given": own, "drawn": moved}.items():
            for steps in self.ascended:
                reached = ascend(module, x[here : here + 1], steps, self.ascent, weights=weights)
                rows += [
                    {"start": start, "ascended": steps, **row}
                    for row in self.curve(module, reached, x, here)
                ]
        return rows

    def curve(
        self, module: nn.Module, weights: Weights, x: Tensor, here: int
    ) -> Iterator[dict[str, Level]]:
        """The rows at one place of the weights."""
        point = x[here : here + 1]
        kernel = tangent_kernel(module, x, point, weights=weights)[:, 0, 0, 0]
        share = kernel / kernel[here]
        finite = (
            finite_step_kernel(module, x, point, self.ascent, weights=weights)[:, 0, 0, 0]
            / kernel[here]
        )

        # A step of descent on (f(x′) − value)² is an ascent of f(x′) by −2η (f(x′) − value).
        function = function_of(module)
        before = function(weights, x)[:, 0]
        size = 2 * self.step_size * (self.value - before[here]).item()
        after = function(ascend(module, point, 1, size, weights=weights), x)[:, 0]
        moved = after - before

        # ∂f(x′)/∂θ, of all parameters in their order
        gradient = torch.func.grad(lambda weights: function(weights, point).sum())(dict(weights))
        slopes = torch.cat([gradient[name].flatten() for name in weights])

        # What the kernel should be: delta·[x = x′] + product·x x′ + constant.
        formula = self.product * x[:, 0] * self.observed + self.constant
        formula[here] += self.delta
        whole: dict[str, Level] = {
            "least": share.min().item(),
            "least_at": x[share.argmin()].item(),
            "largest": share.max().item(),
            "largest_at": x[share.argmax()].item(),
            "finite_largest_at": x[finite.argmax()].item(),
            "spread": (share.max() - share.min()).item(),
            "fastest": 1 + int(slopes.abs().argmax()),
        }
        for k, position in enumerate(x[:, 0].tolist()):
            yield {
                "x": int(position),
                "place": "observed" if k == here else "elsewhere",
                "side": "left" if position < self.boundary else "right",
                "kernel": kernel[k].item(),
                "share": share[k].item(),
                "finite": finite[k].item(),
                **whole,
                "before": before[k].item(),
                "after": after[k].item(),
                "moved": moved[k].item(),
                "wrong_way": float((moved[k] / moved[here]).item() < -ROUNDING),
                "error": ((kernel[k] - formula[k]).abs() / kernel[here]).item(),
            }


def noise_like(weight: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


class FiniteSteps(AbstractTrial):
    """How far the kernel of a finite step is from the tangent kernel, step size by step size:

    A model is read on data: at `points` of them, after steps on each of `observed` others.

        error            ‖k̃_η − k‖/‖k‖ between the probe points and the first training examples
        centred_error    the same of (k̃_η + k̃_{−η})/2, in which the first order cancels
        other_error      the same of k̃_η to the tangent kernel at other weights, to which it does not tend

    Networks are drawn by the seed; a function that starts where its fields say gets scatter·N(0, 1) added to its
    weights.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    step_sizes: tuple[Annotated[float, Field(gt=0)], ...] = Field((0.1, 0.03, 0.01), min_length=2)
    points: Count = 16
    observed: Count = 4
    scatter: float = Field(0.0, ge=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        generator = stream("weights", seed)
        module = self.model.module(
            self.init, tuple(data.train.inputs.shape[1:]), 1, generator, data.vocabulary
        ).eval()
        weights = {
            name: weight + self.scatter * noise_like(weight, generator)
            for name, weight in weights_of(module).items()
        }
        seen = torch.cat([data.train.inputs, data.probe.inputs, data.test.inputs])[: self.points]
        observed = data.train.inputs[: self.observed]
        tangent = tangent_kernel(module, seen, observed, weights=weights)
        elsewhere = {
            name: weight + noise_like(weight, generator) for name, weight in weights.items()
        }
        other = tangent_kernel(module, seen, observed, weights=elsewhere)

        def missed(kernel: Tensor, limit: Tensor) -> float:
            return float((kernel - limit).norm() / limit.norm())

        # the error falls as η, and as η² where the kernels of steps in both directions are averaged
        rows = list[Mapping[str, Level]]()
        for eta in self.step_sizes:
            finite, back = (
                finite_step_kernel(module, seen, observed, size, weights=weights)
                for size in (eta, -eta)
            )
            errors = {
                "error": missed(finite, tangent),
                "centred_error": missed((finite + back) / 2, tangent),
            }
            rows.append({"step_size": eta, **errors, "other_error": missed(finite, other)})
        return rows


class Reparametrised(AbstractTrial):
    """What becomes of a network's outputs and of its tangent kernel where its weights are spelled otherwise:

    A network of torch's own layers, tanh between them, is read at the training examples of the data.

        outputs    ‖f′ − f‖/‖f‖                  change    ‖K′ − K‖/‖K‖

        spelling       the weights of a layer
        weight_norm    W = g v/‖v‖, row by row (T. Salimans and D. Kingma 2016, arXiv:1602.07868)
        batch_norm     the outputs of hidden layers are normalised, and stretched and moved back by two weights each
        rotation       W = Q V, with Q a fixed rotation: the one spelling here that no kernel can tell
    """

    data: AbstractSource
    width: Count = 64
    depth: Count = 2

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x, generator = self.data.split(seed).train.inputs.flatten(1), stream("weights", seed)
        sizes = (x.shape[1], *(self.width,) * self.depth, 1)
        layers = [
            layer for one, other in pairwise(sizes) for layer in (nn.Linear(one, other), nn.Tanh())
        ]
        plain = nn.Sequential(*layers[:-1]).double()
        with torch.no_grad():
            for weight in plain.parameters():
                weight.copy_(
                    torch.randn(weight.shape, generator=generator).double()
                    / weight.shape[-1] ** 0.5
                )

        kernel, outputs = tangent_kernel(plain, x), plain(x).detach()
        rows: list[Mapping[str, Level]] = []
        for spelling, module in self.spellings(plain, x, generator).items():
            change = (tangent_kernel(module, x) - kernel).norm() / kernel.norm()
            missed = (module(x).detach() - outputs).norm() / outputs.norm()
            rows.append({"spelling": spelling, "outputs": missed.item(), "change": change.item()})
        return rows

    def spellings(
        self, plain: nn.Sequential, x: Tensor, generator: torch.Generator
    ) -> dict[str, nn.Module]:
        """The same function with other weights."""
        normed, rotated, batched = deepcopy(plain), deepcopy(plain), nn.Sequential()
        for layer in normed:
            if isinstance(layer, nn.Linear):
                weight_norm(layer)
        for layer in rotated:
            if isinstance(layer, nn.Linear):
                square = torch.randn(
                    layer.out_features, layer.out_features, generator=generator
                ).double()
                register_parametrization(layer, "weight", Rotated(torch.linalg.qr(square).Q))
        for layer in deepcopy(plain):
            batched.append(layer)
            if isinstance(layer, nn.Linear) and layer.out_features == self.width:
                norm = nn.BatchNorm1d(self.width).double()
                with torch.no_grad():
                    values = batched(x)
                    norm.running_mean, norm.running_var = (
                        values.mean(0),
                        values.var(0, correction=0),
                    )
                    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
                    norm.bias.copy_(norm.running_mean)
                batched.append(norm.eval())
        return {"weight_norm": normed, "batch_norm": batched, "rotation": rotated}


class Rotated(nn.Module):
    """W = Q V, of a fixed rotation Q."""

    def __init__(self, rotation: Tensor) -> None:
        super().__init__()
        self.rotation = nn.Buffer(rotation)

    def forward(self, weight: Tensor) -> Tensor:
        """W from V."""
        return self.rotation @ weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        """V from W."""
        return self.rotation.t() @ weight


class ScalarStep(AbstractPicture):
    """A function of one number before and after a step on one observation, beside its kernel with that observation,
    over x.

    A trial of `ScalarCurve` is drawn; so is the kernel of a finite step, and, by this name, that of the control.

    The axes are those of F. Huszár, "Some intuition on the neural tangent kernel" (2020): f(x), and k(x, x′)/k(x′,
    x′).
    """

    finite: bool = False
    control: str = ""

    def figure(self, judged: JudgedClaim) -> Figure:
        trial, rows = curve(judged), given(judged)
        kernels = [("tangent kernel", rows["share"])]
        if self.finite:
            kernels.append((f"step of {spelled(trial.ascent)}", rows["finite"]))
        if self.control:
            kernels.append((self.control, given(judged, CONTROL)["share"]))
        return draw_scalar_step(rows, (trial.observed, trial.value), kernels, moved(rows, trial))

    def here(self, judged: JudgedClaim) -> str:
        trial, rows = curve(judged), given(judged)
        here, share = trial.observed, rows.set_index("x")["share"]
        finite = f" The kernel of the finite step is largest at x = {spelled(rows['finite_largest_at'].iloc[0])}."
        return (
            f"a step of descent has η = {spelled(trial.step_size)}; k(x, {here})/k({here}, {here}) is least "
            f"{at(share, share.min())}, and largest {at(share, share.max())}.{finite * self.finite}"
        )


def curve(judged: JudgedClaim, look: str = MAIN) -> ScalarCurve:
    """Find the trial that is drawn."""
    trial = judged.looks[look].trial
    if not isinstance(trial, ScalarCurve):
        raise Mistake(
            "picture: it draws what ntkexp.claim.trial.ScalarCurve measures; give the claim such a trial"
        )
    return trial


def given(judged: JudgedClaim, look: str = MAIN) -> pd.DataFrame:
    """Find the rows of the model's own start before any ascent, which are the same for every seed."""
    rows = judged.rows("x", "share", "finite", "before", "after", look=look)
    chosen = (
        (rows["start"] == "given") & (rows["ascended"] == 0) & (rows["seed"] == rows["seed"].min())
    )
    curve: pd.DataFrame = rows.loc[chosen].sort_values("x").reset_index(drop=True)
    return curve


def moved(rows: pd.DataFrame, trial: ScalarCurve) -> str:
    """Say what a step does to the value at the observation, and to the others."""
    here = rows[rows["place"] == "observed"].iloc[0]
    others = rows[rows["place"] != "observed"]
    moving = others[others["moved"].abs() > ROUNDING * abs(here["moved"])]
    against = int(moving["wrong_way"].sum())
    many = {0: "none", len(others): "all"}.get(len(moving), f"{len(moving)}")
    ways = f", {against} of them the other way" if against else ""
    return (
        f"A step on ({trial.observed}, {spelled(trial.value)}) moves f({trial.observed}) from "
        f"{spelled(here['before'])} to {spelled(here['after'])}, and {many} of the {len(others)} other values{ways}"
    )


def at(share: pd.Series[float], extreme: float) -> str:
    """Say where a kernel has its extreme, and how large that is.

    >>> at(pd.Series([0.0, 0.0, 1.0], index=[3, 4, 5]), 0.0), at(pd.Series([1.0, -0.27851], index=[-1, 2]), -0.27851)
    ('at 2 places, 0', 'at x = 2, −0.279')
    """
    positions = share.index[(share - extreme).abs() <= ROUNDING]
    where = f"x = {spelled(positions[0])}" if len(positions) == 1 else f"{len(positions)} places"
    return f"at {where}, {spelled(extreme)}"


def spelled(value: float) -> str:
    """Spell a number with up to three digits after the point.

    >>> spelled(-0.27851), spelled(50.0), spelled(35.6)
    ('−0.279', '50', '35.6')
    """
    return f"{round(float(value), 3) + 0.0:.10g}".replace("-", "−")


class ScalarTraining(AbstractPicture):
    """A function of one number after more and more steps that raise f(x′), beside its kernel with x′ after as many.

    A trial of `ScalarCurve` that has several numbers of steps in `ascended` is drawn.

    The axes are those of F. Huszár, "Some intuition on the neural tangent kernel" (2020): f(x), and k(x, x′)/k(x′,
    x′).
    """

    def figure(self, judged: JudgedClaim) -> Figure:
        return draw_scalar_training(
            ascents(judged), curve(judged).observed, changed_range(ascents(judged))
        )

    def here(self, judged: JudgedClaim) -> str:
        trial, rows = curve(judged), ascents(judged)
        spread = rows.groupby("ascended")["share"].agg(lambda share: share.max() - share.min())
        narrower = bool((spread.diff().dropna() < 0).all())
        way = "narrower each time" if narrower else "not narrower each time"
        steps, wide = (
            listed([str(steps) for steps in spread.index]),
            ", ".join(map(spelled, spread)),
        )
        return (
            f"steps of η = {spelled(trial.ascent)} raise f({trial.observed}); drawn is what there is after {steps} of "
            f"them. The range of the kernel is {way}: {wide} wide."
        )


def ascents(judged: JudgedClaim) -> pd.DataFrame:
    """Find the rows of the model's own start, which are the same for every seed."""
    rows = judged.rows("x", "share", "before", "ascended")
    chosen = (rows["start"] == "given") & (rows["seed"] == rows["seed"].min())
    curves: pd.DataFrame = rows.loc[chosen].sort_values(["ascended", "x"]).reset_index(drop=True)
    return curves


def changed_range(rows: pd.DataFrame) -> str:
    """Say in which range the kernel lies at first, and at last."""
    first, last = rows["ascended"].min(), rows["ascended"].max()
    before, after = (rows.loc[rows["ascended"] == steps, "share"] for steps in (first, last))
    ranges = [f"{spelled(share.min())} … {spelled(share.max())}" for share in (before, after)]
    return (
        f"From {first} to {last} steps, the kernel goes from a range of {ranges[0]} to {ranges[1]}"
    )
