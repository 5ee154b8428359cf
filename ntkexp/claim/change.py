"""What is otherwise in another look at a claim, or at another size of it: a control, a second look, quick, or full.

base: [data=teacher]                  said to all runs, after what they were told before
axes: {model.width: [32, 64]}         other values on an axis
runs: {mlp: {base: […], axes: {…}}}   the same for the runs of one name
seeds: 3
quantity, expectation, trial          with _target_: another one; without: the same with these fields otherwise
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ntkexp.config.as_text import spelled
from ntkexp.mistake import Mistake, nearest

KEYS = ("base", "axes", "runs", "seeds", "quantity", "expectation", "trial")
Tree = dict[str, Any]


def changed(tree: Mapping[str, Any], change: Mapping[str, Any], name: str) -> Tree:
    """Make another claim of one.

    >>> claim = {"runs": {"mlp": {"base": ["steps=9"], "axes": {"seed": [1]}}}, "quantity": "drift", "seeds": 5}
    >>> changed(claim, {"base": ["data=moons"], "quantity": "loss", "seeds": 3}, "quick")["runs"]["mlp"]["base"]
    ['steps=9', 'data=moons']
    """
    if not isinstance(change, Mapping):
        raise Mistake(f"{name}={spelled(change)}: it takes KEY: VALUE lines; its keys are {', '.join(KEYS)}")
    for key in change:
        if key not in KEYS:
            raise Mistake(f"{name}.{key}: there is no such key; there are {', '.join(KEYS)}{nearest(str(key), KEYS)}")
    found = deepcopy(dict(tree))
    for_all = {key: change[key] for key in ("base", "axes") if change.get(key)}
    of_each = dict.fromkeys(found.get("runs", {}), for_all) if for_all else {}
    for run, more in [*of_each.items(), *(change.get("runs") or {}).items()]:
        if run not in found["runs"]:
            raise Mistake(f"{name}.runs.{run}: the claim has no such runs{nearest(run, found['runs'])}")
        found["runs"][run] = rerun(found["runs"][run], more)
    refuse_idle(tree, change, name)
    if "seeds" in change:
        found["seeds"] = change["seeds"]
    for key in ("quantity", "trial"):
        if key in change:
            found[key] = merged(found.get(key), change[key])
    if "expectation" in change:
        found["expectation"] = expected(found.get("expectation"), change["expectation"])
    return found


def rerun(run: Mapping[str, Any], more: Mapping[str, Any]) -> Tree:
    """Tell one kind of runs more; an axis that they do not have is left to those that have it."""
    axes = dict(run.get("axes") or {})
    axes |= {key: values for key, values in (more.get("axes") or {}).items() if key in axes}
    return {"axes": axes, "base": [*(run.get("base") or []), *(more.get("base") or [])]}


def refuse_idle(tree: Mapping[str, Any], change: Mapping[str, Any], name: str) -> None:
    """Refuse other values on an axis that no runs have."""
    known = [key for run in tree.get("runs", {}).values() for key in run.get("axes") or {}]
    asked = [change, *(change.get("runs") or {}).values()]
    for key in (key for one in asked for key in one.get("axes") or {}):
        if key not in known:
            raise Mistake(f"{name}.axes.{key}: no runs of the claim have this axis{nearest(key, known)}")


def expected(before: Any, change: Any) -> Any:
    """Change every part of what is expected, or put another in its place."""
    if isinstance(before, list) and isinstance(change, Mapping) and "_target_" not in change:
        return [merged(part, change) for part in before]
    return merged(before, change)


def merged(before: Any, change: Any) -> Any:
    """Put fields in place of those of the same name; what names its class is another component."""
    if isinstance(before, Mapping) and isinstance(change, Mapping) and "_target_" not in change:
        return {**before, **change}
    return change
