"""Which points are attributed where each costs a pass backwards: the first ones of every split, as many of each as of
the others where it has so many.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(count: int, sizes: Sequence[int]) -> list[int]:
    """How many of each group are taken.

    >>> shares(64, [128, 128, 101])
    [22, 21, 21]
    >>> shares(64, [8, 100, 100]), shares(64, [8, 8])
    ([8, 28, 28], [8, 8])
    """
    taken = [0] * len(sizes)
    while (left := count - sum(taken)) > 0 and (open_ := [k for k in range(len(sizes)) if taken[k] < sizes[k]]):
        for turn, k in enumerate(open_):
            fair = left // len(open_) + (turn < left % len(open_))
            taken[k] += min(fair, sizes[k] - taken[k])
    return taken
