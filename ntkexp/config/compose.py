"""KEY=VALUE … → an experiment.

1. Hydra puts the chosen options together (`model=mlp`).
2. Every other override is held against the keys of the chosen components and read with its field in mind.
3. References `${KEY}` are counted, and then followed.
4. `_target_`s become classes, from the leaves up, and pydantic validates them.

>>> compose(["model.width=64", "path.rule=[secant]"]).model.width
64

How much the references of a configuration stand for: counted before one is followed.

    entries(${KEY} …) = 1 + Σ entries(KEY),     of a list or mapping the sum of its parts

A reference stands for a copy, and a few of them in each other for more copies than there is time.

>>> refuse_growth({"a": "x", "b": "${a}${a}", "c": ["${b}", "${.[0]}"]})
>>> refuse_growth({"a0": 1} | {f"a{k}": f"${{a{k - 1}}}${{a{k - 1}}}" for k in range(1, 20)})
Traceback (most recent call last):
ntkexp.mistake.Mistake: a9: its ${…} stand for more than 1000 entries; refer to fewer, or write them out
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic.fields import FieldInfo

from ntkexp.config.build import Builder, admit, keys, unknown
from ntkexp.config.choices import Choices, folders
from ntkexp.config.field_types import OPTIONS, takes
from ntkexp.config.override import Override, assemble, split
from ntkexp.config.override import value as override_value
from ntkexp.config.plain_yaml import as_yaml
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import HIDDEN, SHORTEST, Mistake, first_line, nearest, without_secrets


def compose(overrides: Sequence[str], config_dir: Path | None = None, trust: Sequence[str] = ()) -> Experiment:
    """Compose the experiment that these overrides describe."""
    return resolve(overrides, config_dir, trust).experiment()


@dataclass(frozen=True)
class Resolved:
    """Plain data with every reference followed, and the option of each group."""

    tree: dict[str, Any]
    chosen: dict[str, str]
    builder: Builder

    def experiment(self) -> Experiment:
        """Build the experiment itself, validated."""
        return self.builder.experiment(self.tree)

    def as_yaml(self) -> str:
        """Write what would run: a `config.yaml` for a folder of the user's."""
        fields = self.experiment().fields()
        defaults = "".join(f"  - {group}: {self.chosen[group]}\n" for group in fields if group in self.chosen)
        return f"defaults:\n{defaults}  - _self_\n\n{as_yaml(completed(self.tree, fields))}"


def completed(tree: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The tree as the user wrote it, with the fields that only a class has a default for."""
    return {
        key: completed(item, fields.get(key, {})) if isinstance(item, dict) else item
        for key, item in (fields | tree).items()
    }


def resolve(overrides: Sequence[str], config_dir: Path | None = None, trust: Sequence[str] = ()) -> Resolved:
    """Do everything but the validation."""
    return composer(config_dir, trust).resolve(overrides)


def composer(config_dir: Path | None = None, trust: Sequence[str] = ()) -> Composer:
    """Make a composer for these folders and packages."""
    return Composer(Builder(admit(trust), Choices(folders(config_dir))))


@dataclass(frozen=True)
class Composer:
    """A composer makes many experiments: options are put together once for each selection, which takes most of the
    time.
    """

    builder: Builder
    assembled: dict[tuple[tuple[str, str], ...], tuple[DictConfig, dict[str, str]]] = field(default_factory=dict)

    def resolve(self, overrides: Sequence[str]) -> Resolved:
        """Everything but the validation."""
        given = {override.key: override for override in map(split, overrides)}  # the last word counts
        picked = {key: option(given[key], self.builder.choices) for key in self.groups if key in given}
        config, chosen = self.selected(picked)
        known: dict[str, FieldInfo] = {}
        for override in sorted(given.values(), key=lambda override: not override.key.endswith("._target_")):
            if override.key not in picked:
                known = known or known_keys(config, self.builder)
                found = assign(config, override, known, chosen, self.builder.choices)
                target = override.key.endswith("._target_") or f"{override.key}._target_" in known
                if target or isinstance(found, Mapping):
                    known = {}  # another component has keys of its own
        return Resolved(followed(config, chosen, self.builder), chosen, self.builder)

    @cached_property
    def groups(self) -> list[str]:
        """These keys choose an option."""
        return [group for group in self.builder.choices.groups() if group in Experiment.model_fields]

    def selected(self, picked: Mapping[str, str]) -> tuple[DictConfig, dict[str, str]]:
        """Make a tree of one's own with these options, and find the option of every group."""
        key = tuple(sorted(picked.items()))
        if key not in self.assembled:
            self.assembled[key] = assemble(picked, self.builder.choices)
        config, chosen = self.assembled[key]
        return deepcopy(config), chosen


def option(override: Override, choices: Choices) -> str:
    """Find the option that an override chooses."""
    group, known = override.key, choices.options(override.key)
    name = override.value.strip("'\"")
    if not name:
        raise Mistake(f"{group} is given no value; write {group}=NAME with one of {', '.join(known)}")
    if "," in name and all(part.strip() in known for part in name.split(",")):
        raise Mistake(f"{override}: a run has one {group}; write {group}={name.split(',')[0].strip()}")
    if name not in known:
        alias = OPTIONS.get(group, {}).get(name.lower())
        hint = f"; did you mean '{alias}'?" if alias in known else nearest(name, known)
        raise Mistake(f"{override}: there is no such {group}; choose from {', '.join(known)}{hint}")
    return name


def known_keys(config: DictConfig, builder: Builder) -> dict[str, FieldInfo]:
    """Go through every key of a tree, with its field."""
    return dict(keys(plain(config), Experiment, builder))


def plain(config: DictConfig) -> dict[str, Any]:
    """The tree as it stands, no reference followed."""
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    return {str(key): item for key, item in tree.items()}


def assign(
    config: DictConfig,
    override: Override,
    known: Mapping[str, FieldInfo],
    chosen: Mapping[str, str],
    choices: Choices,
) -> Any:
    """Put one value into the tree; the value."""
    if override.key not in known:
        raise unknown(override.key, known, chosen, choices)
    found = override_value(override, known[override.key])
    try:
        OmegaConf.update(config, override.key, found, force_add=True)
    except OmegaConfBaseException as error:
        raise Mistake(f"{override}: {first_line(error)}") from None
    return found


def followed(config: DictConfig, chosen: Mapping[str, str], builder: Builder) -> dict[str, Any]:
    """Plain data, with every `${…}` replaced by what it refers to."""
    try:
        with warnings.catch_warnings():
            refuse_growth(plain(config))
            warnings.simplefilter("ignore")  # ${oc.deprecated:…} speaks of keys, in the words of a library
            tree = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise missing(config, str(error.full_key), builder) from None
    except OmegaConfBaseException as error:
        raise Mistake(f"{error.full_key}: {first_line(error)}; ${{KEY}} takes a key that has a value") from None
    except RecursionError:
        raise Mistake("the configuration refers to itself in a circle; look for ${…} in it") from None
    assert isinstance(tree, dict)
    return {str(key): item for key, item in tree.items()}


def missing(config: DictConfig, key: str, builder: Builder) -> Mistake:
    """What to give for a `???`."""
    field = known_keys(config, builder).get(key)
    return Mistake(f"{key} has no default; write {key}=VALUE" + (f": it takes {takes(field)}" if field else ""))


# --- How much the references of a configuration stand for.


DEEPEST = 50
MOST = 1000  # in all of a configuration: to follow one takes about a millisecond
LONG = 1000  # letters that count as an entry

Place: TypeAlias = tuple[str, ...]
"""The keys that lead to a node."""

REFERENCE = re.compile(r"\$\{\s*([^${}:]*)([:}$]?)")
KEY = re.compile(r"\.*[\w.\[\]-]+")


def of_environment(name: str, *default: Any) -> Any:
    """Follow `${oc.env:NAME}` as OmegaConf does, and remember the value: no message shows it."""
    found = oc.env(name, *default)
    if isinstance(found, str) and len(found) >= SHORTEST and name in os.environ:
        HIDDEN[found] = f"${{oc.env:{without_secrets(name)}}}"
    return found


OmegaConf.register_new_resolver("oc.env", of_environment, replace=True)


def refuse_growth(tree: Mapping[str, Any]) -> None:
    """References that lie too deep in each other, or stand for too much."""
    extent = Extent(tree)
    if len(extent.texts) > MOST or sum(extent(place)[0] for place in extent.texts) > MOST:
        raise Mistake(f"the ${{…}} of this configuration stand for more than {MOST} entries; write some of them out")


class Extent:
    """How many entries a node is, and how deep references lie in each other there."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree, self.level = tree, 0
        self.known: dict[Place, tuple[int, int]] = {}
        self.texts = [place for place, node in leaves(tree, ()) if refers(node)]

    def __call__(self, place: Place) -> tuple[int, int]:
        if place not in self.known:
            self.known[place] = 0, 0  # until it is known: who follows a circle says so by himself
            node = self.node(place)
            if refers(node):
                self.known[place] = self.followed(place, node)
            else:
                parts = [self((*place, key)) for key, _ in children(node)]
                own = 1 + (len(node) // LONG if isinstance(node, str) else 0)
                self.known[place] = own + sum(part[0] for part in parts), max((part[1] for part in parts), default=0)
        return self.known[place]

    def followed(self, place: Place, text: str) -> tuple[int, int]:
        """What a text with references stands for."""
        self.level += 1
        targets = list(self.targets(place, text)) if self.level <= DEEPEST else []
        parts = [self(target) for target in targets]
        entries = text.count("${") + len(text) // LONG + sum(part[0] for part in parts)
        depth = max(self.level, 1 + max((part[1] for part in parts), default=0))
        self.level -= 1
        if entries > MOST or depth > DEEPEST:
            found = f"stand for more than {MOST} entries" if entries > MOST else f"lead on more than {DEEPEST} times"
            raise Mistake(f"{'.'.join(place)}: its ${{…}} {found}; refer to fewer, or write them out")
        return entries, 1 + max((part[1] for part in parts), default=0)

    def targets(self, place: Place, text: str) -> Iterator[Place]:
        """What a text refers to, or may refer to."""
        for found in REFERENCE.finditer(text):
            if found[2] == "$":  # the key is made of another reference
                yield from self.texts
            words = KEY.findall(text, found.end()) if found[2] == ":" else [found[1].strip()]
            yield from (target for word in words if (target := self.target(place, word)) is not None)

    def target(self, place: Place, key: str) -> Place | None:
        """Where a key leads, as far as no other reference lies on the way; dots at its front are steps up."""
        up = len(key) - len(key.lstrip("."))
        found = place[: len(place) - up] if up else ()
        for part in re.findall(r"[^.\[\]]+", key):
            if refers(self.node(found)):
                return found
            if child(self.node(found), part) is None:
                return None
            found = (*found, part)
        return found

    def node(self, place: Place) -> Any:
        """What lies at a place."""
        found: Any = self.tree
        for key in place:
            found = child(found, key)
        return found


def refers(node: object) -> bool:
    """Whether a node is a text with a reference."""
    return isinstance(node, str) and "${" in node


def child(node: object, key: str) -> Any:
    """What lies there under a key, if anything."""
    if isinstance(node, Mapping):
        return node.get(key) if key in node else next((node[other] for other in node if str(other) == key), None)
    if isinstance(node, list | tuple) and key.isdecimal() and len(key) < LONG and int(key) < len(node):
        return node[int(key)]
    return None


def children(node: object) -> Iterator[tuple[str, Any]]:
    """What a mapping or list holds, by keys."""
    if isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, list | tuple):
        yield from ((str(k), value) for k, value in enumerate(node))


def leaves(node: object, place: Place) -> Iterator[tuple[Place, Any]]:
    """Whatever holds nothing else."""
    parts = list(children(node))
    for key, value in parts:
        yield from leaves(value, (*place, key))
    if not parts:
        yield place, node
