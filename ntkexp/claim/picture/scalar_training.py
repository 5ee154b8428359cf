"""A function of one number after more and more steps that raise f(x′), beside its kernel with x′ after as many.

The axes are those of F. Huszár, "Some intuition on the neural tangent kernel" (2020): f(x), and k(x, x′)/k(x′, x′).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.picture.scalar_step import curve, spelled
from ntkexp.text import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ntkexp.claim.judged_claim import JudgedClaim


class ScalarTraining(AbstractPicture):
    """A trial of `ScalarCurve` that has several numbers of steps in `ascended` is drawn."""

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.report.plots.redrawn.scalar_training import draw  # noqa: PLC0415  drawing is slow to load

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
