"""A value as it would be written on the command line.

>>> spelled([1, None, "a"]), spelled(True), spelled("x")
('[1, null, a]', 'true', 'x')
"""

from __future__ import annotations

import yaml


def spelled(value: object) -> str:
    """Spell a value as YAML on one line, and text as it stands."""
    if isinstance(value, str):
        return value
    text = str(yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True))
    return text.removesuffix("\n...\n").strip()
