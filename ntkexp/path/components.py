"""Components: groups of parameters, by which every inner product over weights is told apart.

A contribution is Σ_p over parameters of terms ⟨V, Jᵢᵀℓ′ᵢ⟩_p, and so is what decay does. A
component's share is the partial sum over its parameters, so that shares add up to the whole:

    contribution(x, xᵢ) = Σ_component by_component(x, xᵢ, component)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from ntkexp.mistake import Mistake, in_short, nearest

By: TypeAlias = Literal["module", "parameter"] | Mapping[str, Sequence[str]]
Components: TypeAlias = Mapping[str, frozenset[str]]
"""Names of components, in order, and of the parameters of each."""

PARAMETRISED = (
    ".parametrizations."  # beneath a module whose weight torch.nn.utils.parametrize makes of others
)
ROOT = "(root)"  # the module itself, where it owns parameters


def components_of(by: By, parameters: Iterable[str], key: str = "by") -> dict[str, frozenset[str]]:
    """The components of these parameters: each parameter by itself, the modules that own them, or
    what the patterns of each name match, as those of a shell. A component whose only pattern is '*'
    is the rest, taken last.

    >>> names = ["body.0.weight", "body.0.bias", "head.weight"]
    >>> [*components_of("module", names)], [*components_of("parameter", names)] == names
    (['body.0', 'head'], True)
    >>> {name: len(each) for name, each in components_of({"first": ["body.*"], "others": ["*"]}, names).items()}
    {'first': 2, 'others': 1}
    """
    names = list(parameters)
    if isinstance(by, Mapping):
        return matched(by, names, key)
    if not isinstance(by, str) or by not in ("module", "parameter"):
        raise Mistake(
            f"{key}={in_short(by)} is none of 'module', 'parameter' and a dict of names to patterns of "
            "parameters, such as "
            "{'first': ['layers.0.*'], 'rest': ['*']}"
        )
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(name if by == "parameter" else owner(name), set()).add(name)
    return {name: frozenset(each) for name, each in found.items()}


def owner(parameter: str) -> str:
    """The module that owns a parameter, by its path; what a parametrised weight is made of is its
    module's.

    >>> owner("block.1.weight"), owner("scale"), owner("head.parametrizations.weight.original0")
    ('block.1', '(root)', 'head')
    """
    module = (
        parameter.partition(PARAMETRISED)[0]
        if PARAMETRISED in parameter
        else parameter.rpartition(".")[0]
    )
    return module or ROOT


def matched(
    by: Mapping[str, Sequence[str]], parameters: Sequence[str], key: str
) -> dict[str, frozenset[str]]:
    """The components of patterns, of which exactly one has each parameter."""
    patterns = {
        str(name): [each]
        if isinstance(each, str)
        else list(each)
        if isinstance(each, list | tuple)
        else []
        for name, each in by.items()
    }
    if wrong := [
        name
        for name, each in patterns.items()
        if not each or not all(isinstance(p, str) for p in each)
    ]:
        raise Mistake(
            f"{key}: '{wrong[0]}' has no list of patterns; give one, such as ['layers.0.*']"
        )
    rest = [name for name, each in patterns.items() if each == ["*"]]
    if not patterns or len(rest) > 1:
        what = (
            "no component"
            if not patterns
            else f"the rest, '*', is both '{rest[0]}' and '{rest[1]}'"
        )
        raise Mistake(
            f"{key}={dict(by)}: {what}; name components, of which one at most takes what is left by '*'"
        )

    # who is matched by what; a pattern that matches nothing is a slip of the pen
    found: dict[str, frozenset[str]] = {}
    taken: dict[str, str] = {}
    for name, each in patterns.items():
        if name in rest:
            continue
        for pattern in each:
            if not any(fnmatchcase(parameter, pattern) for parameter in parameters):
                raise Mistake(
                    f"{key}: '{pattern}' of '{name}' matches no trained parameter{nearest(pattern, parameters)}"
                )
        found[name] = frozenset(
            p for p in parameters if any(fnmatchcase(p, pattern) for pattern in each)
        )
        if both := sorted(found[name] & taken.keys()):
            raise Mistake(
                f"{key}: '{both[0]}' is in both '{taken[both[0]]}' and '{name}', and would be counted twice; each "
                "parameter is in one component"
            )
        taken |= dict.fromkeys(found[name], name)

    # the rest, last; without one, nothing is left
    left = [parameter for parameter in parameters if parameter not in taken]
    if left and not rest:
        known = [pattern for each in patterns.values() for pattern in each]
        close = nearest(left[0], known).removeprefix("; did you mean ").removesuffix("?")
        hint = f" (nearest: {close})" if close else ""
        raise Mistake(
            f"{key}: no pattern matches '{left[0]}'{hint}; add one, or 'rest': ['*'] for all that is left"
        )
    found |= {name: frozenset(left) for name in rest}
    return {name: found[name] for name in patterns}
