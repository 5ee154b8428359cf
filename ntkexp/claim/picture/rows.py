"""Pictures of the judged rows: as they are, against width, at the interpolation threshold, and of single trials."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import Field

from ntkexp.claim.claim import CONTROL, MAIN, SECOND
from ntkexp.claim.expectation.base import AbstractExpectation, chosen
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.trial.kernels import FAMILIES, ROUNDING, ScalarCurve
from ntkexp.component import Count
from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord
from ntkexp.report.analysis.estimate import PowerLaw, power_law
from ntkexp.report.analysis.laws import number
from ntkexp.text import listed, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.claim import JudgedClaim

MOST = 3
HEIGHT = 2.5  # inches


class JudgedRows(AbstractPicture):
    """The rows of the first look, those of the second behind them, and what was expected.

    A claim that says nothing of its picture has this one.

    Each part of the claim has a place of its own, up to three of them, that which decides first; blue is the first
    look, orange the second.
    """

    def figure(self, judged: JudgedClaim) -> Figure:
        from matplotlib.figure import Figure  # noqa: PLC0415  slow, and judging needs none

        from ntkexp.report.plots.style import BLUE, NARROW, ORANGE, WIDE, heading, wrapped  # noqa: PLC0415  the same

        looks, parts = {SECOND: ORANGE, MAIN: BLUE}, drawn(judged)
        figure = Figure(figsize=(NARROW if len(parts) == 1 else WIDE, HEIGHT), layout="constrained")
        for axes, of_looks in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            for (name, colour), part in zip(looks.items(), of_looks, strict=True):
                rows = drawable(part, judged.tables[name])
                if rows is not None:
                    part.draw(axes, rows, colour)
            of_looks[-1].mark(axes)
            if len(parts) > 1:
                axes.set_title("\n".join(wrapped(of_looks[-1].whole_words, 44 // len(parts) * 2)))
        heading(figure, title(judged.record))
        return figure

    def here(self, judged: JudgedClaim) -> str:
        there, shown = len(judged.claim.looks[MAIN].expectation), len(drawn(judged))
        missing = f"; of {there} parts that are expected, {shown} are drawn" if shown < there else ""
        return f"blue is the claim's own look, orange the second{missing}."


def drawn(judged: JudgedClaim) -> list[tuple[AbstractExpectation, ...]]:
    """The parts that are drawn, as the second look and as the first has them: that first which decides the first."""
    found = zip(*(judged.claim.looks[name].expectation for name in (SECOND, MAIN)), strict=False)
    return sorted(found, key=lambda part: not judged.record.main.expected.startswith(part[-1].whole_words))[:MOST]


def title(record: ClaimRecord) -> str:
    """Say in a sentence what was found."""
    main = record.main
    found = f"{short(main.figure)}, 95 % {short(main.low)} to {short(main.high)}"
    return f"{record.name.replace('_', ' ').capitalize()}: {main.verdict} ({found})"


def drawable(part: AbstractExpectation, table: pd.DataFrame) -> pd.DataFrame | None:
    """Find the rows that can be drawn, if the part could speak of them."""
    try:
        rows = chosen(table, part.where)
        rows = rows[rows["value"].notna()]
        return rows if len(rows) and part.judge(rows) else None
    except Mistake:
        return None


class ChangeByWidth(AbstractPicture):
    """How far weights and kernel move, against width, log–log, beside lines of 1/√n and 1/n.

    Each panel has lines, named columns of the rows that `where` chooses; the last is the one of the title.

    The axes are those of J. Lee et al., "Wide neural networks of any depth evolve as linear models under gradient
    descent" (2019), arXiv:1902.06720, figure 1.
    """

    along: str = "model.width"
    where: dict[str, Any] = Field(default_factory=dict)
    panels: dict[str, dict[str, str]] = Field(min_length=1)

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.report.plots.redrawn import draw_change_by_width as draw  # noqa: PLC0415  drawing is slow to load

        return draw(self.rows(judged), self.along, self.panels, self.title(judged))

    def here(self, judged: JudgedClaim) -> str:
        rows = self.rows(judged)
        told = [
            listed([f"{line} {number(self.law(rows, name).exponent.value)}" for line, name in lines.items()])
            for lines in self.panels.values()
        ]
        return f"the exponents of width are: {'; '.join(told)}, by {rows['seed'].nunique()} seeds."

    def title(self, judged: JudgedClaim) -> str:
        """Say how the last line goes, and which of the two it is nearer to."""
        panel, lines = list(self.panels.items())[-1]
        found = self.law(self.rows(judged), list(lines.values())[-1]).exponent.value
        near, far = ("1/n", "1/√n") if found < -0.75 else ("1/√n", "1/n")
        return f"The change of the {panel} goes as n to the power {number(found)}, nearer to {near} than to {far}"

    def rows(self, judged: JudgedClaim) -> pd.DataFrame:
        """Find the rows that are drawn."""
        columns = [name for lines in self.panels.values() for name in lines.values()]
        return chosen(judged.rows(self.along, "seed"), self.where).dropna(subset=columns)

    def law(self, rows: pd.DataFrame, name: str) -> PowerLaw:
        """Fit one line."""
        x, y = (np.asarray(rows[key], dtype=np.float64) for key in (self.along, name))
        return power_law(x, y, rows["seed"].to_numpy(dtype=np.int64))


FITTED = 1e-3
"""Training examples are fitted where the mean error is a smaller share of the targets' variance."""


class InterpolationPeak(AbstractPicture):
    """Test and train error against the number of parameters, with the threshold from which on training examples are
    fitted.

    A trial of `WidthSweep` is drawn; `threshold` is its number of targets, M·C.

    The axes are those of M. Belkin et al., "Reconciling modern machine-learning practice and the classical
    bias–variance trade-off" (2019), arXiv:1812.11118, figure 4; the kernel's condition number is on the same axis.
    """

    threshold: float = Field(gt=0)

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.report.plots.redrawn import draw_interpolation_peak as draw  # noqa: PLC0415  drawing is slow to load

        return draw(measured(judged), self.threshold, self.title(judged))

    def title(self, judged: JudgedClaim) -> str:
        """Say where the mean test error is largest, and how far it falls beyond."""
        means = over_seeds(judged)["test_error"]
        top, last = means.idxmax(), means.index[-1]
        fall = "the largest number that was tried" if top == last else f"and falls to {short(means.iloc[-1])} at {last}"
        return (
            f"The test error is largest at {top} parameters, {short(means.max())}, {fall}; "
            f"there are {short(self.threshold)} targets"
        )

    def here(self, judged: JudgedClaim) -> str:
        means = over_seeds(judged)
        fitted = means.index[means["train_error"] < FITTED]
        beyond = f"from {fitted[0]} parameters on" if len(fitted) else "nowhere"
        return (
            f"errors are shares of the targets' variance, means over {measured(judged)['seed'].nunique()} seeds; "
            f"training examples are fitted, to {FITTED}, {beyond}.{before(means, self.threshold)}"
        )


def before(means: pd.DataFrame, threshold: float) -> str:
    """Say where the test error is least below the threshold, and whether it is less beyond."""
    errors = means["test_error"]
    below, beyond = errors[errors.index < threshold], errors[errors.index > threshold]
    if below.empty or beyond.empty:
        return ""
    how = "less" if beyond.min() < below.min() else "not less"
    return (
        f" Below the threshold the test error is least at {below.idxmin()} parameters, {short(below.min())}; beyond it "
        f"is {how} than that: {short(beyond.min())} at {beyond.idxmin()}."
    )


def measured(judged: JudgedClaim) -> pd.DataFrame:
    """Find the rows that are drawn."""
    return judged.rows("parameters", "test_error", "train_error", "condition", "seed")


def over_seeds(judged: JudgedClaim) -> pd.DataFrame:
    """Average the errors over seeds, at each number of parameters."""
    return measured(judged).groupby("parameters")[["test_error", "train_error"]].mean()


REGRESSORS = ("process", "kernel", "network")


class AccuracyTable(AbstractPicture):
    """A table of accuracies by depth, kernels and networks side by side, with those that the paper has.

    A trial of `ConvolutionalAccuracy` is set beside `per_cent`: by family and depth, what its paper has.

    S. Arora et al., "On exact computation with an infinitely wide neural net" (2019), arXiv:1904.11955, has such a
    table 1.
    """

    per_cent: dict[str, dict[Count, float]]
    numbers: tuple[()] = ()
    """They stand in `per_cent`."""

    def figure(self, judged: JudgedClaim) -> Figure:
        return JudgedRows().figure(judged)

    def table(self, judged: JudgedClaim) -> pd.DataFrame:
        ours = accuracies(judged)
        depths = sorted({depth for depth, *_ in ours} | {depth for paper in self.per_cent.values() for depth in paper})
        found: dict[str, list[float | None]] = {"depth": [*depths]}
        for family in dict.fromkeys(family for _, family, _ in ours):
            for name in REGRESSORS:
                found[f"{family} {name}, %"] = [ours.get((depth, family, name)) for depth in depths]
            if family in self.per_cent:
                found[f"{family} paper, %"] = [self.per_cent[family].get(depth) for depth in depths]
        return pd.DataFrame(found)

    def here(self, judged: JudgedClaim) -> str:
        ours, seeds = accuracies(judged), measured_accuracies(judged)["seed"].nunique()
        means = {name: fmean(value for (*_, other), value in ours.items() if other == name) for name in REGRESSORS}
        told = [f"{name} {means[name]:.1f} %" for name in sorted(REGRESSORS, key=lambda name: -means[name])]
        plain, pooled = FAMILIES
        gains = [
            f"{ours[depth, pooled, 'kernel'] - value:.1f} points at depth {depth}".replace("-", "−")
            for (depth, family, name), value in ours.items()
            if (family, name) == (plain, "kernel")
        ]
        return (
            f"on the data of the claim, pooling changes the accuracy of the kernel by {listed(gains)}; over all depths "
            f"and families the mean accuracies are {listed(told)}, by {seeds} seeds."
        )


def measured_accuracies(judged: JudgedClaim) -> pd.DataFrame:
    """Find the rows that the table is made of."""
    return judged.rows("depth", "family", "regressor", "accuracy", "seed")


def accuracies(judged: JudgedClaim) -> dict[tuple[int, str, str], float]:
    """Find the accuracy of each depth, family and regressor in per cent, the mean over seeds."""
    cells = (
        measured_accuracies(judged)
        .groupby(["depth", "family", "regressor"], sort=False)["accuracy"]
        .mean()
        .reset_index()
    )
    names = zip(cells["depth"].astype(int), cells["family"], cells["regressor"], strict=True)
    return dict(zip(names, (100 * cells["accuracy"]).round(1), strict=True))


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
        from ntkexp.report.plots.redrawn import draw_scalar_step as draw  # noqa: PLC0415  drawing is slow to load

        trial, rows = curve(judged), given(judged)
        kernels = [("tangent kernel", rows["share"])]
        if self.finite:
            kernels.append((f"step of {spelled(trial.ascent)}", rows["finite"]))
        if self.control:
            kernels.append((self.control, given(judged, CONTROL)["share"]))
        return draw(rows, (trial.observed, trial.value), kernels, moved(rows, trial))

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
    trial = judged.claim.looks[look].trial
    if not isinstance(trial, ScalarCurve):
        raise Mistake("picture: it draws what ntkexp.claim.trial.ScalarCurve measures; give the claim such a trial")
    return trial


def given(judged: JudgedClaim, look: str = MAIN) -> pd.DataFrame:
    """Find the rows of the model's own start before any ascent, which are the same for every seed."""
    rows = judged.rows("x", "share", "finite", "before", "after", look=look)
    chosen = (rows["start"] == "given") & (rows["ascended"] == 0) & (rows["seed"] == rows["seed"].min())
    found: pd.DataFrame = rows.loc[chosen].sort_values("x").reset_index(drop=True)
    return found


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
    places = share.index[(share - extreme).abs() <= ROUNDING]
    where = f"x = {spelled(places[0])}" if len(places) == 1 else f"{len(places)} places"
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
        from ntkexp.report.plots.redrawn import draw_scalar_training as draw  # noqa: PLC0415  drawing is slow to load

        return draw(ascents(judged), curve(judged).observed, changed_range(ascents(judged)))

    def here(self, judged: JudgedClaim) -> str:
        trial, rows = curve(judged), ascents(judged)
        spread = rows.groupby("ascended")["share"].agg(lambda share: share.max() - share.min())
        narrower = bool((spread.diff().dropna() < 0).all())
        way = "narrower each time" if narrower else "not narrower each time"
        steps, wide = listed([str(steps) for steps in spread.index]), ", ".join(map(spelled, spread))
        return (
            f"steps of η = {spelled(trial.ascent)} raise f({trial.observed}); drawn is what there is after {steps} of "
            f"them. The range of the kernel is {way}: {wide} wide."
        )


def ascents(judged: JudgedClaim) -> pd.DataFrame:
    """Find the rows of the model's own start, which are the same for every seed."""
    rows = judged.rows("x", "share", "before", "ascended")
    chosen = (rows["start"] == "given") & (rows["seed"] == rows["seed"].min())
    found: pd.DataFrame = rows.loc[chosen].sort_values(["ascended", "x"]).reset_index(drop=True)
    return found


def changed_range(rows: pd.DataFrame) -> str:
    """Say in which range the kernel lies at first, and at last."""
    first, last = rows["ascended"].min(), rows["ascended"].max()
    before, after = (rows.loc[rows["ascended"] == steps, "share"] for steps in (first, last))
    ranges = [f"{spelled(share.min())} … {spelled(share.max())}" for share in (before, after)]
    return f"From {first} to {last} steps, the kernel goes from a range of {ranges[0]} to {ranges[1]}"
