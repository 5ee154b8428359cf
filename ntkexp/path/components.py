"""Components: groups of parameters, which split every inner product over weights.

The contribution of a training example is an inner product of two vectors in the shape
of the weights. So it is a sum over parameters. The share of a component is the partial
sum over the parameters of the component. The shares add up to the contribution:

    contribution(x, xᵢ) = Σ_component by_component(x, xᵢ, component)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from ntkexp.mistake import Mistake, in_short, nearest

By: TypeAlias = Literal["module", "parameter"] | Mapping[str, Sequence[str]]
Components: TypeAlias = Mapping[str, frozenset[str]]
"""Ordered components: the name of each component, with the names of its parameters."""

# part of the names of parameters under torch.nn.utils.parametrize
PARAMETRISED = ".parametrizations."
# name of the component with the parameters that the root module itself owns
ROOT = "(root)"


def components_of(
    by: By, parameters: Iterable[str], key: str = "by"
) -> dict[str, frozenset[str]]:
    """Group parameters into components: by parameter, by module, or by shell patterns.

    A component whose only pattern is '*' contains all parameters that no other
    component matches. `key` is the name of the setting in error messages.

    >>> names = ["body.0.weight", "body.0.bias", "head.weight"]
    >>> [*components_of("module", names)], [*components_of("parameter", names)] == names
    (['body.0', 'head'], True)
    >>> named = components_of({"first": ["body.*"], "others": ["*"]}, names)
    >>> {name: len(members) for name, members in named.items()}
    {'first': 2, 'others': 1}
    """
    names = list(parameters)
    if isinstance(by, Mapping):
        return matched(by, names, key)
    if not isinstance(by, str) or by not in ("module", "parameter"):
        raise Mistake(
            f"{key}={in_short(by)}: give 'module', 'parameter', or a dict of names to patterns "
            "of parameters, such as {'first': ['layers.0.*'], 'rest': ['*']}"
        )
    components: dict[str, set[str]] = {}
    for name in names:
        component = name if by == "parameter" else owner(name)
        components.setdefault(component, set()).add(name)
    return {name: frozenset(members) for name, members in components.items()}


def owner(parameter: str) -> str:
    """Return the name of the module that owns a parameter, without the suffix of
    `torch.nn.utils.parametrize`.

    >>> owner("block.1.weight"), owner("scale"), owner("head.parametrizations.weight.original0")
    ('block.1', '(root)', 'head')
    """
    module = parameter.rpartition(".")[0]
    if PARAMETRISED in parameter:
        module = parameter.partition(PARAMETRISED)[0]
    return module or ROOT


def matched(
    by: Mapping[str, Sequence[str]], parameters: Sequence[str], key: str
) -> dict[str, frozenset[str]]:
    """Return the components that shell patterns define. Raise unless each parameter is
    in exactly one component."""
    patterns = {str(name): patterns_of(value) for name, value in by.items()}
    for name, own in patterns.items():
        if not own or not all(isinstance(pattern, str) for pattern in own):
            raise Mistake(
                f"{key}: '{name}' has no list of patterns; give one, such as ['layers.0.*']"
            )
    rest = [name for name, own in patterns.items() if own == ["*"]]
    if not patterns or len(rest) > 1:
        what = "no component"
        if rest:
            what = f"the rest, '*', is both '{rest[0]}' and '{rest[1]}'"
        raise Mistake(
            f"{key}={dict(by)}: {what}; name components, and give '*' to at most one, which "
            "contains the rest"
        )

    components: dict[str, frozenset[str]] = {}
    owners: dict[str, str] = {}
    for name, own in patterns.items():
        if name in rest:
            continue
        members = members_of(name, own, parameters, key)
        components[name] = members
        both = sorted(members & owners.keys())
        if both:
            raise Mistake(
                f"{key}: '{both[0]}' is in both '{owners[both[0]]}' and '{name}'; put each "
                "parameter in one component"
            )
        owners |= dict.fromkeys(members, name)

    # unmatched parameters belong to the component '*'; without this component, raise
    unmatched = [parameter for parameter in parameters if parameter not in owners]
    if unmatched and not rest:
        known = [pattern for own in patterns.values() for pattern in own]
        close = (
            nearest(unmatched[0], known)
            .removeprefix("; did you mean ")
            .removesuffix("?")
        )
        hint = f" (nearest: {close})" if close else ""
        raise Mistake(
            f"{key}: no pattern matches '{unmatched[0]}'{hint}; add one, or 'rest': ['*'] for "
            "all other parameters"
        )
    components |= {name: frozenset(unmatched) for name in rest}
    return {name: components[name] for name in patterns}


def members_of(
    component: str, patterns: Sequence[str], parameters: Sequence[str], key: str
) -> frozenset[str]:
    """Return the parameters that match a component's patterns. Raise for a pattern
    without a match, which is probably misspelled."""
    members: set[str] = set()
    for pattern in patterns:
        matches = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matches:
            raise Mistake(
                f"{key}: '{pattern}' of '{component}' matches no trained parameter"
                f"{nearest(pattern, parameters)}"
            )
        members.update(matches)
    return frozenset(members)


def patterns_of(value: object) -> list[str]:
    """Return a list of patterns from a string or a sequence.
    Any other value gives an empty list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return list(value)
    return []
