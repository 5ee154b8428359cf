"""Parts of a trial or of a quantity go by names, by which their rows are told apart."""

from __future__ import annotations

from collections.abc import Sequence

from ntkexp.mistake import Mistake


def refuse_unnamed(key: str, names: Sequence[str], kind: str, parts: Sequence[object]) -> None:
    """Refuse parts of which one has no name, or that of another."""
    if len(names) != len(parts) or len(set(names)) < len(names):
        raise Mistake(f"{key}={list(names)}: give each of the {len(parts)} {kind} a name of its own")
