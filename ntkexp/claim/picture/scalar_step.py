"""A function of one number before and after a step on one observation, beside its kernel with that observation, over x.

The axes are those of F. Huszár, "Some intuition on the neural tangent kernel" (2020): f(x), and k(x, x′)/k(x′, x′).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from ntkexp.claim.claim import CONTROL, MAIN
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.trial.scalar_curve import ROUNDING, ScalarCurve
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim


class ScalarStep(AbstractPicture):
    """A trial of `ScalarCurve` is drawn; so is the kernel of a finite step, and, by this name, that of the control."""

    finite: bool = False
    control: str = ""

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.report.plots.redrawn.scalar_step import draw  # noqa: PLC0415  drawing is slow to load

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
