"""What a step is said to have missed, where numbers are none."""

from __future__ import annotations

from math import inf, nan

import pytest

from ntkexp.path.integrals import Rounding, Tally
from ntkexp.run.outcome import miss_remarks

ROUNDING = Rounding(terms=1.0, eps=2.0**-52)


@pytest.mark.parametrize(
    "tally",
    [
        Tally(missed=nan, changed=1.0, outputs=1.0),
        Tally(missed=nan, changed=1.0, outputs=1.0, contribution_mass=nan),
        Tally(missed=inf, changed=1.0, outputs=1.0, contribution_mass=inf),
        Tally(missed=1e-3, changed=1.0, outputs=1.0, contribution_mass=nan),
    ],
)
def test_an_error_that_is_no_number_is_not_explained_by_rounding(tally: Tally) -> None:
    found = tally.miss(ROUNDING)
    assert found is not None
    other = Tally(missed=1e-4, changed=1.0, outputs=1.0).miss(ROUNDING)
    assert other is not None
    assert "misses 2 steps, most of all step 3" in miss_remarks({2: other, 3: found})[0]


@pytest.mark.parametrize("size", [inf, nan])
def test_a_run_that_has_diverged_misses_nothing(size: float) -> None:
    assert Tally(missed=nan, changed=size, outputs=size).miss(ROUNDING) is None
