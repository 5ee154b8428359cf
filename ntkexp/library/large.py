"""A kernel that this machine cannot hold is refused before anything of it is computed.

>>> refuse_large("kernel", 10**6, 10**6, outputs=1000, needed=8e18)  # doctest: +ELLIPSIS
Traceback (most recent call last):
ntkexp.mistake.Mistake: the kernel of 1000000 × 1000000 examples with 1000 outputs each takes 8e+09 GB, and this ...
"""

from __future__ import annotations

import os

from ntkexp.mistake import Mistake


def refuse_large(
    what: str, probe: int, train: int, *, outputs: int, needed: float, choice: str = "outputs=[0]"
) -> None:
    """Refuse what takes more bytes than the machine has; fewer outputs are had by a `choice`."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise Mistake(
            f"the {what} of {probe} × {train} examples with {outputs} outputs each takes {needed / 1e9:.3g} GB, and "
            f"this machine has {room / 1e9:.3g}; choose some by {choice}, or have the module give fewer, such "
            "as the log-likelihood of a text"
        )
