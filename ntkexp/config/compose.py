"""Compose an experiment from the overrides KEY=VALUE of a command.

    override  ['+' | '++'] KEY '=' VALUE      Hydra's + has no effect, because all keys exist
    KEY       words joined by dots
    VALUE     Hydra's grammar. For a text field, VALUE is the text itself, unless it is quoted,
              null or contains ${…}

1. Split each override at its '='. The last override of a key wins.
2. Merge the YAML files of the chosen options (`model=mlp`).
3. Look up the keys of all other overrides. Parse each value according to the type of its field.
4. Check the size of the references `${KEY}`, then resolve them.
5. Build and validate the components (`ntkexp.config.build`).

>>> split("model.width=64")
Override(key='model.width', value='64')
>>> compose(["model.width=64", "path.rule=[secant]"]).model.width
64
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic.fields import FieldInfo
from yaml import YAMLError

from ntkexp.config.build import Builder, admit, config_keys, unknown_key
from ntkexp.config.choices import Choices, comment_of, config_folders
from ntkexp.config.field_types import (
    OPTIONS,
    accepted_values,
    is_list,
    is_text,
    may_be_text,
)
from ntkexp.config.plain_yaml import as_yaml, read_yaml, refuse_reference_growth
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import (
    HIDDEN,
    MIN_HIDDEN_LETTERS,
    HydraSetting,
    Mistake,
    first_line,
    nearest,
    without_secrets,
)

# --- 1. One override: its key and the text of its value.


KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
MAX_VALUE_LETTERS = 5000  # Hydra's parser takes a second for a value of this length
MARKED = re.compile(r"""null|'.*'|".*"|.*\$\{.*\}.*""", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override KEY=VALUE: the key, and the text of the value,
    which may be empty."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def split(text: str) -> Override:
    """Split an override at its '='."""
    if re.match(r"\+{0,2}hydra([./@=]|$)", text):
        raise HydraSetting(f"{text}: settings of Hydra have no effect here")
    if text.startswith("~"):
        raise Mistake(
            f"{text}: keys cannot be removed; leave one out to keep its default, or give it a value"
        )
    key, equals, value = text.partition("=")
    key = re.sub(r"^\+{1,2}", "", key).strip()
    if not key:
        raise Mistake(
            f"{text or repr(text)}: there is no key; write KEY=VALUE, such as seed=3"
        )
    if not KEY.fullmatch(key):
        raise Mistake(
            f"{text}: '{key}' is not a key; write KEY=VALUE with words joined by dots, such as model.width=64"
        )
    return Override(key, value.strip() if equals else "")


def read_option(override: Override, choices: Choices) -> str:
    group = override.key
    options = choices.options(group)
    name = override.value.strip("'\"")
    if not name:
        raise Mistake(
            f"{group} is given no value; write {group}=NAME with one of {', '.join(options)}"
        )
    if "," in name and all(part.strip() in options for part in name.split(",")):
        raise Mistake(
            f"{override}: a run has one {group}; write {group}={name.split(',')[0].strip()}"
        )
    if name not in options:
        alias = OPTIONS.get(group, {}).get(name.lower())
        hint = (
            f"; did you mean '{alias}'?" if alias in options else nearest(name, options)
        )
        raise Mistake(
            f"{override}: there is no such {group}; choose from {', '.join(options)}{hint}"
        )
    return name


def read_value(override: Override, field: FieldInfo) -> Any:
    if not override.value or override.value == "???":
        raise Mistake(
            f"{override.key} is given no value; write {override.key}=VALUE: it takes {accepted_values(field)}"
        )
    if is_text(field.annotation) and not MARKED.fullmatch(override.value):
        return override.value
    if len(override.value) > MAX_VALUE_LETTERS:
        raise Mistake(
            f"{override.key} is given {len(override.value)} characters, and an override takes up to "
            f"{MAX_VALUE_LETTERS}; write a longer value into a YAML file of yours"
        )
    try:
        parsed = OverridesParser.create().parse_override(str(override))
        is_sweep = parsed.is_sweep_override()
        value = parsed.value()
    # numbers with 5000 digits raise ValueError, and 500 nested brackets RecursionError
    except (HydraException, ValueError, RecursionError):
        if may_be_text(field.annotation):
            return override.value
        raise Mistake(
            f"{override}: the value cannot be read; {override.key} takes {accepted_values(field)}"
        ) from None
    if not is_sweep:
        return value
    if may_be_text(field.annotation):
        return override.value
    raise Mistake(
        f"{override}: a run has one value for each key; write {single_value(override, field)}"
    )


def single_value(override: Override, field: FieldInfo) -> str:
    """Suggest an override with one value, in place of one with several values.

    >>> single_value(Override("model.width", "64,128"), FieldInfo(annotation=int))
    'model.width=64'
    """
    if is_list(field.annotation):
        return f"a list as {override.key}=[{override.value}]"
    first = re.search(r"[\w.+-]+(?=\s*[,)])", override.value)
    return f"{override.key}={first.group() if first else 'VALUE'}"


# --- 2. Merge the files of the chosen options into one tree.
#
# The list `defaults` of a file names the options that are merged into the file.
# `config.yaml` names an option of each group. An option can name other options of its
# group. Later entries of the list override earlier ones. The entry `_self_` marks the
# position of the file's own keys. Without it, they are merged last.


OWN_KEYS = "_self_"


def assemble(
    selected: Mapping[str, str], choices: Choices
) -> tuple[DictConfig, dict[str, str]]:
    """Merge the files of the selected options, and the default options of other groups.

    Return the merged tree, and the option of every group.
    """
    defaults = choices.defaults()
    chosen = defaults | dict(selected)
    parts = {
        group: load_option(group, option, choices) for group, option in chosen.items()
    }
    added = {group: part for group, part in parts.items() if group not in defaults}

    def options_of(entry: Mapping[str, str]) -> Mapping[str, Any]:
        return {group: parts[group] for group in entry}

    with named_in_errors(choices.root()):
        tree = OmegaConf.merge(merge_defaults(choices.root(), options_of), added)
    assert isinstance(tree, DictConfig)
    return tree, chosen


def load_option(
    group: str, option: str, choices: Choices, inside: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """Load an option, merged with its `defaults`.

    `inside` are the options that include this one. Raise if an option includes itself.
    """
    file = choices.file(group, option)
    if option in inside:
        raise Mistake(f"{file}: its 'defaults' include the file itself")
    return merge_defaults(
        file, lambda name: load_option(group, str(name), choices, (*inside, option))
    )


def merge_defaults(file: Path, load: Callable[[Any], Mapping[str, Any]]) -> DictConfig:
    """Load a file, merged with its `defaults`. `load` reads an entry of `defaults`."""
    fields = read_yaml(file)
    if "hydra" in fields:
        raise Mistake(f"{file}: settings of Hydra have no effect here; remove 'hydra'")
    entries = fields.get("defaults", [])
    if not isinstance(entries, list):
        raise Mistake(f"{file}: 'defaults' takes a list, such as '- mlp'")
    if OWN_KEYS not in entries:
        entries.append(OWN_KEYS)
    with named_in_errors(file):
        own_fields = OmegaConf.load(file)
        assert isinstance(own_fields, DictConfig)
        own_fields.pop("defaults", None)
        tree = OmegaConf.merge(
            *(own_fields if entry == OWN_KEYS else load(entry) for entry in entries)
        )
    assert isinstance(tree, DictConfig)
    return tree


@contextmanager
def named_in_errors(file: Path) -> Iterator[None]:
    """Convert errors of YAML or OmegaConf inside the block to a `Mistake`
    that names the file."""
    try:
        yield
    except Mistake:
        raise
    except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise Mistake(f"{file}: {' '.join(str(error).split())}") from None


# --- 3 to 5. From overrides to an experiment.


def compose(
    overrides: Sequence[str], config_dir: Path | None = None, trust: Sequence[str] = ()
) -> Experiment:
    """Compose an experiment from overrides KEY=VALUE.

    `config_dir` is a folder of YAML files, which replace the package's files of the
    same names. `trust` lists packages and files whose code may run."""
    return resolve(overrides, config_dir, trust).experiment()


def resolve(
    overrides: Sequence[str], config_dir: Path | None = None, trust: Sequence[str] = ()
) -> Resolved:
    """Return the experiment as plain data, before validation."""
    return composer(config_dir, trust).resolve(overrides)


def composer(config_dir: Path | None = None, trust: Sequence[str] = ()) -> Composer:
    return Composer(Builder(admit(trust), Choices(config_folders(config_dir))))


@dataclass(frozen=True)
class Resolved:
    """A composed experiment as plain data without references,
    before it is validated."""

    tree: dict[str, Any]
    chosen: dict[str, str]
    builder: Builder

    def experiment(self) -> Experiment:
        return self.builder.experiment(self.tree)

    def as_yaml(self) -> str:
        """Return this experiment as a `config.yaml`,
        which a user can put into a folder of configs."""
        fields = self.experiment().fields()
        defaults = "".join(
            f"  - {group}: {self.chosen[group]}\n"
            for group in fields
            if group in self.chosen
        )
        return f"defaults:\n{defaults}  - _self_\n\n{as_yaml(completed(self.tree, fields))}"


def completed(tree: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return `tree`. Take missing keys from `fields`, which contains default values."""
    return {
        key: completed(item, fields.get(key, {})) if isinstance(item, dict) else item
        for key, item in (fields | tree).items()
    }


@dataclass(frozen=True)
class Composer:
    """A composer of many experiments. It caches the merged options,
    because merging is slow."""

    builder: Builder
    assembled: dict[tuple[tuple[str, str], ...], tuple[DictConfig, dict[str, str]]] = (
        field(default_factory=dict)
    )

    @cached_property
    def groups(self) -> list[str]:
        """The groups that are keys of an experiment and take one option,
        such as `model`."""
        fields = Experiment.model_fields
        return [
            group
            for group in self.builder.choices.groups()
            if group in fields and not is_list(fields[group].annotation)
        ]

    def resolve(self, overrides: Sequence[str]) -> Resolved:
        """Return the experiment as plain data, before validation."""
        token = environment_is_read.set(bool(self.builder.trusted))
        try:
            return self.resolved(overrides)
        finally:
            environment_is_read.reset(token)

    def resolved(self, overrides: Sequence[str]) -> Resolved:
        choices = self.builder.choices
        by_key = {override.key: override for override in map(split, overrides)}
        selected = {
            key: read_option(by_key[key], choices)
            for key in self.groups
            if key in by_key
        }

        # copy the cached tree of these options
        selection = tuple(sorted(selected.items()))
        if selection not in self.assembled:
            self.assembled[selection] = assemble(selected, choices)
        config, chosen = self.assembled[selection]
        config = deepcopy(config)

        # set the other values, `_target_` first, because it determines the valid keys
        keys: dict[str, FieldInfo] = {}
        for override in sorted(
            by_key.values(), key=lambda override: not override.key.endswith("._target_")
        ):
            if override.key in selected:
                continue
            keys = keys or known_keys(config, self.builder)
            if override.key not in keys:
                raise unknown_key(override.key, keys, chosen, choices)
            value = read_value(override, keys[override.key])
            try:
                OmegaConf.update(config, override.key, value, force_add=True)
            except OmegaConfBaseException as error:
                raise Mistake(f"{override}: {first_line(error)}") from None
            changes_component = (
                override.key.endswith("._target_")
                or f"{override.key}._target_" in keys
                or isinstance(value, Mapping)
            )
            if changes_component:
                keys = {}  # look up the keys of the new component
        tree = follow_references(config, self.builder, chosen)
        return Resolved(tree, chosen, self.builder)


def known_keys(config: DictConfig, builder: Builder) -> dict[str, FieldInfo]:
    """Return every dotted key of a tree, with its pydantic field."""
    return dict(config_keys(plain_data(config, resolve=False), Experiment, builder))


def plain_data(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """Convert the tree to plain data. If `resolve`, replace its references `${KEY}` by
    the values, and raise if a value is missing."""
    tree = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(tree, dict)
    return {str(key): item for key, item in tree.items()}


def follow_references(
    config: DictConfig, builder: Builder, chosen: Mapping[str, str]
) -> dict[str, Any]:
    """Resolve all references `${KEY}`, and return plain data.
    Raise with the key of an error."""
    try:
        with warnings.catch_warnings():
            refuse_reference_growth(plain_data(config, resolve=False))
            # ${oc.deprecated:…} would print the library's own text
            warnings.simplefilter("ignore")
            return plain_data(config, resolve=True)
    except MissingMandatoryValue as error:  # a value is still the placeholder `???`
        key = str(error.full_key)
        field = known_keys(config, builder).get(key)
        kind = f": it takes {accepted_values(field)}" if field else ""
        group, _, name = key.partition(".")
        if group in chosen:
            comment = comment_of(builder.choices.file(group, chosen[group]), name)
            kind = f": {comment}" if comment else kind
        raise Mistake(f"{key} has no default; write {key}=VALUE{kind}") from None
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, ReadsEnvironment):
            raise Mistake(f"{error.full_key}: {error.__cause__}") from None
        raise Mistake(
            f"{error.full_key}: {first_line(error)}; ${{KEY}} takes a key that has a value"
        ) from None
    except RecursionError:
        raise Mistake(
            "the configuration refers to itself in a circle; look for ${…} in it"
        ) from None


class ReadsEnvironment(Mistake):
    """The error if a configuration contains ${oc.env:…}, but no code is trusted."""


environment_is_read: ContextVar[bool] = ContextVar("environment_is_read", default=False)
"""True if ${oc.env:…} is allowed. Trusted code can read environment variables
anyway."""


def of_environment(name: str, *default: Any) -> Any:
    """Resolve `${oc.env:NAME}` like OmegaConf. Hide the value from later messages.

    Raise `ReadsEnvironment` if no code is trusted.
    """
    if not environment_is_read.get():
        raise ReadsEnvironment(
            f"${{oc.env:{name}}}: environment variables are read only together with trusted code, "
            "because a value may be a secret, and results store it; write the value itself"
        )
    value = oc.env(name, *default)
    if (
        isinstance(value, str)
        and len(value) >= MIN_HIDDEN_LETTERS
        and name in os.environ
    ):
        HIDDEN[value] = f"${{oc.env:{without_secrets(name)}}}"
    return value


OmegaConf.register_new_resolver("oc.env", of_environment, replace=True)
