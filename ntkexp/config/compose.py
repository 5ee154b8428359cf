"""KEY=VALUE … → an experiment.

1. Hydra puts the chosen options together (`model=mlp`).
2. Every other override is held against the keys of the chosen components and read with its field in mind.
3. `_target_`s become classes, from the leaves up, and pydantic validates them.

>>> compose(["model.width=64", "path.rule=[secant]"]).model.width
64
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic.fields import FieldInfo

from ntkexp.config.aliases import OPTIONS
from ntkexp.config.build import Builder
from ntkexp.config.choices import Choices
from ntkexp.config.field_types import takes
from ntkexp.config.folders import folders
from ntkexp.config.hydra_compose import assemble
from ntkexp.config.keys import keys, unknown
from ntkexp.config.override import Override, split, value
from ntkexp.config.references import refuse_growth
from ntkexp.config.target import admit
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake, first_line, nearest


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
    found = value(override, known[override.key])
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
