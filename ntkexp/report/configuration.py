"""Configurations of runs as tables show them: by dotted keys, and only where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ntkexp.chapter import option
from ntkexp.records.folder import CIRCUMSTANCES


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name nested configuration by dotted keys, without circumstances; a component goes by its own name.

    >>> flat({"model": {"_target_": "ntkexp.model.MLP", "width": 8}, "seed": 0, "threads": 2})
    {'model': 'mlp', 'model.width': 8, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif key == "_target_":
            found |= {prefix.rstrip("."): option(str(value))} if prefix else {}
        elif prefix or key not in CIRCUMSTANCES:
            found[prefix + key] = f"[{','.join(map(item, value))}]" if isinstance(value, list) else value
    return found


def item(value: object) -> str:
    """Spell one of a list, in few letters."""
    return option(str(value.get("_target_"))) if isinstance(value, Mapping) else str(value)


def differing(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Find the keys whose values differ, in the order in which they first stand; a configuration may lack some.

    >>> differing([{"width": 8, "depth": 2}, {"width": 9, "depth": 2, "seed": 0}])
    ['width', 'seed']
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
