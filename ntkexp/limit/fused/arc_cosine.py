"""The arc cosine without trigonometry: two polynomials and a square root.

With ρ ≥ 0, t = 2ρ − 1 and v = √(1 − ρ),

    ϑ = arccos ρ = v P(t),    sin ϑ − ρϑ = v³ Q(t),

P and Q being analytic on [−1, 1], and everything near ρ = 1 in the square root. Chebyshev sums, computed with 60 digits
and written as powers: relative errors 1e-15 (degree 16) and 2e-15 (14) in float64, 2e-7 (6) and 1.5e-7 (5) in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

ANGLE = (
    1.480960979386122,
    -0.0760160912346503,
    0.011029313317973908,
    -0.00214913585971806,
    0.00048205410080041987,
    -0.0001174124943522419,
    3.0187166843649764e-05,
    -8.063600679357754e-06,
    2.216039610288938e-06,
    -6.223317961744095e-07,
    1.7790703300266097e-07,
    -5.197953798050399e-08,
    1.5257551778951588e-08,
    -4.102044564899384e-09,
    1.2229492339493375e-09,
    -6.081211523283149e-10,
    1.851111751086014e-10,
)
GAP = (
    0.9685287633970561,
    -0.028167834290562233,
    0.0027982527541668524,
    -0.00041180955857242227,
    7.399821008840123e-05,
    -1.5012798407768814e-05,
    3.3048990020104247e-06,
    -7.714469791908656e-07,
    1.8821849358245438e-07,
    -4.764533654585752e-08,
    1.237226710942835e-08,
    -3.1377533187559536e-09,
    8.46942896109075e-10,
    -3.313550806822701e-10,
    9.301431034552783e-11,
)
ANGLE_SINGLE = tuple(
    np.float32(c)
    for c in (
        1.480960979386122,
        -0.07601710599077761,
        0.011029593772552826,
        -0.002141096968959455,
        0.0004798331844653625,
        -0.00013302194232519095,
        3.449462493051909e-05,
    )
)
GAP_SINGLE = tuple(
    np.float32(c)
    for c in (
        0.9685288762006966,
        -0.02816786081492517,
        0.0027962288000751142,
        -0.0004113337735933161,
        7.929601020904662e-05,
        -1.6256318673553083e-05,
    )
)


def angle(t: Any) -> Any:
    """The polynomial P(t) of the angle."""
    raise NotImplementedError  # for numba alone


def gap(t: Any) -> Any:
    """The polynomial Q(t) of the gap."""
    raise NotImplementedError  # for numba alone


@overload(angle, inline="always")
def _angle(t: Any) -> Callable[[Any], Any]:
    def double(t: Any) -> Any:
        p = ANGLE[16]
        p = ANGLE[12] + t * (ANGLE[13] + t * (ANGLE[14] + t * (ANGLE[15] + t * p)))
        p = ANGLE[8] + t * (ANGLE[9] + t * (ANGLE[10] + t * (ANGLE[11] + t * p)))
        p = ANGLE[4] + t * (ANGLE[5] + t * (ANGLE[6] + t * (ANGLE[7] + t * p)))
        p = ANGLE[0] + t * (ANGLE[1] + t * (ANGLE[2] + t * (ANGLE[3] + t * p)))
        return p

    def single(t: Any) -> Any:
        p = ANGLE_SINGLE[6]
        p = ANGLE_SINGLE[2] + t * (ANGLE_SINGLE[3] + t * (ANGLE_SINGLE[4] + t * (ANGLE_SINGLE[5] + t * p)))
        p = ANGLE_SINGLE[0] + t * (ANGLE_SINGLE[1] + t * p)
        return p

    return single if t == types.float32 else double


@overload(gap, inline="always")
def _gap(t: Any) -> Callable[[Any], Any]:
    def double(t: Any) -> Any:
        p = GAP[14]
        p = GAP[10] + t * (GAP[11] + t * (GAP[12] + t * (GAP[13] + t * p)))
        p = GAP[6] + t * (GAP[7] + t * (GAP[8] + t * (GAP[9] + t * p)))
        p = GAP[2] + t * (GAP[3] + t * (GAP[4] + t * (GAP[5] + t * p)))
        p = GAP[0] + t * (GAP[1] + t * p)
        return p

    def single(t: Any) -> Any:
        p = GAP_SINGLE[5]
        p = GAP_SINGLE[1] + t * (GAP_SINGLE[2] + t * (GAP_SINGLE[3] + t * (GAP_SINGLE[4] + t * p)))
        p = GAP_SINGLE[0] + t * p
        return p

    return single if t == types.float32 else double
