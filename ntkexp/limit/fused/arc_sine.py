"""The arc sine without trigonometry: one polynomial and a square root.

    arcsin s = w A(w²),                          w = s                 up to s = ½,
    arcsin s = π/2 − 2 w A(w²),                  w = √((1 − s)/2)      beyond,

so that it is the rest 1 − s that is taken: it may be known better than s. A is analytic far beyond [0, ¼]: a Chebyshev
sum, computed with 60 digits and written as powers, with a relative error of 3e-17 (degree 12), 3e-10 (6) in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ntkexp.limit.fused.jit import compiled

ARC = (
    1.0,
    0.1666666666666484,
    0.07500000000404858,
    0.044642856791215726,
    0.03038196027149515,
    0.02237173660319574,
    0.017359969965541983,
    0.013883027829435166,
    0.0121816790888421,
    0.006480855348779324,
    0.01964239671205795,
    -0.016384436448802192,
    0.032011340323281685,
)
ARC_SINGLE = tuple(
    np.float32(c)
    for c in (
        1.0000000002453038,
        0.1666665721387794,
        0.07500591501960488,
        0.044505242015329426,
        0.031884142973420244,
        0.014198827965636922,
        0.03780636152096081,
    )
)


def share(z: Any) -> Any:
    """The polynomial A(z)."""
    raise NotImplementedError  # for numba alone


@overload(share, inline="always")
def _share(z: Any) -> Callable[[Any], Any]:
    def double(z: Any) -> Any:
        p = ARC[12]
        p = ARC[8] + z * (ARC[9] + z * (ARC[10] + z * (ARC[11] + z * p)))
        p = ARC[4] + z * (ARC[5] + z * (ARC[6] + z * (ARC[7] + z * p)))
        p = ARC[0] + z * (ARC[1] + z * (ARC[2] + z * (ARC[3] + z * p)))
        return p

    def single(z: Any) -> Any:
        p = ARC_SINGLE[6]
        p = ARC_SINGLE[3] + z * (ARC_SINGLE[4] + z * (ARC_SINGLE[5] + z * p))
        p = ARC_SINGLE[0] + z * (ARC_SINGLE[1] + z * (ARC_SINGLE[2] + z * p))
        return p

    return single if z == types.float32 else double


@compiled
def arc_sine(s: Any, rest: Any, half: Any, quarter_turn: Any) -> Any:
    """The angle whose sine is s; `rest` is 1 − |s|, `half` and `quarter_turn` are ½ and π/2 in its precision."""
    short = abs(s)
    near = short <= half
    w = short if near else np.sqrt(half * rest)
    angle = w * share(w * w)
    angle = angle if near else quarter_turn - angle - angle
    return angle if s >= 0 else -angle
