"""How long something takes, for a reader.

>>> duration(3.2), duration(200), duration(9000), duration(0), duration(1e6), duration(1e11)
('3 s', '3.3 min', '2.5 h', '0 s', '12 days', '3.2e+03 years')
"""

from __future__ import annotations

DAY = 86_400.0
YEAR = 365.25 * DAY


def duration(seconds: float) -> str:
    """Seconds, minutes, hours, days or years."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 4 * DAY:
        return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
    return f"{seconds / DAY:.0f} days" if seconds < 2 * YEAR else f"{seconds / YEAR:.2g} years"
