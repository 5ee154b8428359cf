"""How long something takes, for a reader.

>>> duration(3.2), duration(200), duration(9000), duration(0)
('3 s', '3.3 min', '2.5 h', '0 s')
"""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
