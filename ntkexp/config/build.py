"""Build components from plain data. Nested components are built first.

`_target_: ntkexp.model.MLP` names the class of a component. pydantic validates the
component's fields. For components of this package, the name omits the file, and the
package imports only the file of this class. Other components are named
`package.module.Class`. Importing a module runs its code. So the user must first trust
the other packages and files (such as my_net.py).

>>> from ntkexp.loss import AbstractLoss
>>> component_class("ntkexp.loss.Squared", AbstractLoss, "loss")
<class 'ntkexp.loss.Squared'>
>>> Builder().component({"_target_": "ntkexp.loss.Squared", "reduction": "sum"}, (AbstractLoss,), "loss")
Squared(reduction='sum')
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field as dataclasses_field
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ntkexp.component import Component, can_be_built
from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.field_types import (
    KEYS,
    accepted_values,
    component_bases,
    is_list,
    plain_types,
    refusal,
)
from ntkexp.config.plain_yaml import read_yaml, spell_value
from ntkexp.experiment.experiment import Experiment
from ntkexp.layer.spec import names_layer, parse_layer
from ntkexp.mistake import (
    TRUSTED_CODE,
    Mistake,
    UnknownKey,
    Untrusted,
    WrongArgument,
    nearest,
)
from ntkexp.model.foreign import allow_imports, allow_module, load_module
from ntkexp.model.user_function import FunctionInFile
from ntkexp.naming import (
    LAZY_PACKAGES,
    PACKAGE,
    class_path,
    is_in_this_package,
    module_of_class,
)

SOURCE_FOLDER = Path(__file__).parents[2]
"""The folder that contains this package."""

# --- Classes by their names.


def component_class(
    target: object, base: type[Component], key: str, trusted: Collection[str] = ()
) -> type[Component]:
    """Import the class with the name `target`. Raise unless it is a concrete subclass of
    `base`, from this package or trusted code."""
    override = f"{key}._target_={target}".removeprefix(".")
    module_name, _, name = str(target).rpartition(".")
    if (
        not isinstance(target, str)
        or not all(part.isidentifier() for part in target.split("."))
        or not module_name
    ):
        raise Mistake(f"{override} names no class; write package.module.Class")
    if not any(
        f"{module_name}.".startswith(f"{package}.") for package in (PACKAGE, *trusted)
    ):
        package = module_name.split(".")[0]
        raise Untrusted(
            f"{override} lies outside {PACKAGE}, and is imported only if you trust it",
            package,
        )
    refuse_file_name(module_name, name, override)
    module = import_named(module_name, override)
    try:
        kind = getattr(module, name)
    except AttributeError as error:
        # a package that loads its classes lazily raises an error
        # that names the nearest class
        hint = "" if module_name in LAZY_PACKAGES else nearest(name, dir(module))
        raise Mistake(f"{override}: {error}{hint}") from None
    if not (isinstance(kind, type) and issubclass(kind, base) and can_be_built(kind)):
        raise Mistake(
            f"{override} is not a class of {base.__name__} that can be built; choose one, such as {example_path(base)}"
        )
    return kind


def refuse_file_name(module_name: str, name: str, override: str) -> None:
    """Raise if the name of a class of this package contains the name of its file."""
    parent, _, file = module_name.rpartition(".")
    folder = SOURCE_FOLDER.joinpath(*parent.split("."))
    if (
        is_in_this_package(module_name)
        and (folder / f"{file}.py").is_file()
        and import_module(parent).__name__ in LAZY_PACKAGES
    ):
        classes = [f"{parent}.{kind}" for kind in module_of_class((str(folder),))]
        raise Mistake(
            f"{override}: name classes by their package, not by their file{nearest(f'{parent}.{name}', classes)}"
        )


def import_named(name: str, override: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        parent = name.rpartition(".")[0]
        # in a package of ours, suggest one of its modules
        folder = SOURCE_FOLDER.joinpath(*parent.split("."))
        parts = [file.parent.name for file in folder.glob("*/__init__.py")]
        parts += [file.stem for file in folder.glob("[!_]*.py")]
        hint = nearest(name, [f"{parent}.{part}" for part in parts])
        raise Mistake(f"{override}: there is no module {error.name}{hint}") from None
    except Exception as error:  # a module of the user may raise anything
        if name.split(".", maxsplit=1)[0] == PACKAGE:
            raise
        raise Mistake(
            f"{override}: {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def example_path(base: type[Component]) -> str:
    """Return the name of any concrete subclass of `base`,
    as an example in error messages."""
    concrete = [kind for kind in base.__subclasses__() if can_be_built(kind)] or [base]
    return class_path(concrete[0])


# --- Python code of the user, which runs only if it is trusted.


def admit(entries: Sequence[str]) -> tuple[str, ...]:
    """Import the files that the user trusts, and check that the trusted packages can be
    imported.

    Return the module names to use in a `_target_`.
    """
    return tuple(
        admit_file(Path(entry)) if entry.endswith(".py") else admit_package(entry)
        for entry in entries
    )


def admit_package(name: str) -> str:
    """Return the name of a trusted package. Raise if it cannot be imported from
    sys.path or the working folder."""
    first = name.partition(".")[0]
    try:
        if first not in sys.modules and find_spec(first) is None:
            allow_imports(allow_module(first, [Path.cwd()]), [Path.cwd()])
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise WrongArgument(
            f"trust={name}: there is no such package; it takes the name of a package, or a file my_net.py",
            "trust",
        )
    folders = spec.submodule_search_locations
    if folders is None:
        TRUSTED_CODE.add(str(spec.origin))
    else:
        TRUSTED_CODE.update(f"{folder}{os.sep}" for folder in folders)
    return name


def admit_file(file: Path) -> str:
    """Import a file as a module named after the file.
    Errors name the line in the file."""
    # Path.resolve fails for a link to itself
    file = Path(os.path.realpath(file.expanduser()))
    argument = f"trust={file}"
    if not file.is_file():
        raise WrongArgument(
            f"{argument}: there is no such file; it takes the name of a package, or a file my_net.py",
            "trust",
        )
    if file.stem == PACKAGE:
        raise WrongArgument(
            f"{argument}: '{PACKAGE}' cannot be the name of a new module; give the file another name",
            "trust",
        )
    TRUSTED_CODE.add(str(file))
    try:
        return load_module(file, argument).__name__
    except Mistake as mistake:
        raise WrongArgument(str(mistake), "trust") from mistake


def refuse_untrusted(
    files: Collection[Path], key: str, trusted: Collection[str]
) -> None:
    """Raise if a file of Python code is outside the trusted files and packages."""
    specs = [
        spec for name in trusted if files and (spec := find_spec(name)) is not None
    ]
    trusted_folders = [
        Path(folder).resolve()
        for spec in specs
        for folder in spec.submodule_search_locations or ()
    ]
    for file in files:
        path = file.resolve()
        if not (
            any(spec.origin == str(path) for spec in specs)
            or any(map(path.is_relative_to, trusted_folders))
        ):
            raise Untrusted(
                f"{key}: {file} is your own Python code, which runs only if you trust it",
                quote(str(file)),
            )


def load_function(path: str, key: str, trust: Sequence[str]) -> Callable[..., Any]:
    """Return a function of the user, FILE.py:FUNCTION, from a trusted file."""
    function = FunctionInFile(path, f"{key}={path}")
    if not function.is_well_formed:
        raise WrongArgument(
            f"{key}={path}: it takes FILE.py:FUNCTION, such as my_loop.py:train", key
        )
    refuse_untrusted((function.file,), key, admit(trust))
    return function.load()


# --- Components. Nested components are built first.


def build(fields: Mapping[str, Any], trusted: tuple[str, ...] = ()) -> Experiment:
    return Builder(trusted).experiment(fields)


@dataclass(frozen=True)
class Builder:
    """A builder of components from this package and from trusted code.

    A field of components also takes the names of options, such as `path.rule=[secant]`.
    The builder reads the YAML files of these options."""

    trusted: tuple[str, ...] = ()
    choices: Choices = dataclasses_field(
        default_factory=lambda: Choices(config_folders(None))
    )
    files: dict[tuple[str, str], dict[str, Any]] = dataclasses_field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of all groups, cached because a sweep may build a thousand
        experiments."""
        return frozenset(self.choices.groups())

    def experiment(self, tree: Mapping[str, Any]) -> Experiment:
        experiment = self.component(tree, (Experiment,), "")
        assert isinstance(experiment, Experiment)
        return experiment

    def component(
        self, node: Mapping[str, Any], bases: tuple[type[Component], ...], key: str
    ) -> Component:
        """Build a component and, before it, the components in its fields."""
        kind = self.kind(node, bases, key)
        fields = {
            str(name): value for name, value in node.items() if name != "_target_"
        }
        children = {
            name: self.child(
                value, kind.model_fields.get(name), f"{key}.{name}".removeprefix(".")
            )
            for name, value in fields.items()
        }
        try:
            component = kind.model_validate(children)
        except ValidationError as error:
            raise refusal(error, kind, key, fields) from None
        refuse_untrusted(component.code(), key, self.trusted)
        return component

    def kind(
        self, node: Mapping[str, Any], bases: tuple[type[Component], ...], key: str
    ) -> type[Component]:
        """Return the component class of a mapping. If the expected class is concrete,
        `_target_` may be missing."""
        base = next(
            (
                candidate
                for candidate in bases
                if class_path(candidate) == node.get("_target_")
            ),
            bases[0],
        )
        if "_target_" in node:
            return component_class(node["_target_"], base, key, self.trusted)
        if not can_be_built(base):
            raise Mistake(
                f"{key} has no _target_; name a class of {base.__name__}, such as {example_path(base)}"
            )
        return base

    def child(self, value: Any, field: FieldInfo | None, key: str) -> Any:
        """Return the value of a field. Build all components in it."""
        if field is None:  # an unknown field: pydantic raises an error
            return value
        types = set(plain_types(field.annotation))
        bases = component_bases(field.annotation)
        # pydantic would convert true to the number 1
        if isinstance(value, bool) and types & {int, float} and bool not in types:
            raise Mistake(
                f"{key}={spell_value(value)}: it takes {accepted_values(field)}"
            )
        if not bases:
            return value
        if isinstance(value, str | Mapping) and is_list(field.annotation):
            value = [value]
        return self.components(value, bases, key)

    def components(
        self, value: Any, bases: tuple[type[Component], ...], key: str
    ) -> Any:
        """Build a component from a mapping or the name of an option,
        or several from a list."""
        if isinstance(value, Mapping):
            if names_layer(value):
                return parse_layer(value, key)
            return self.component(value, bases, key)
        if isinstance(value, list | tuple):
            return tuple(self.components(item, bases, key) for item in value)
        group = class_path(bases[0]).split(".")[-2]  # a package is named like its group
        if not (isinstance(value, str) and group in self.groups):
            return value
        if group == "diagnostics" and ".py" in value:  # FILE.py:FUNCTION
            target = {"_target_": f"{PACKAGE}.diagnostics.UserFunction", "path": value}
            return self.component(target, bases, key)
        try:
            if (group, value) not in self.files:  # read each file only once
                self.files[group, value] = read_yaml(self.choices.file(group, value))
        except Mistake as mistake:
            raise Mistake(f"{key}: {mistake}") from None
        return self.component(self.files[group, value], bases, key)


# --- The keys of the chosen components, and suggestions for unknown keys.


def config_keys(
    tree: Mapping[str, Any], kind: type[Component], builder: Builder, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of the chosen components, with its pydantic field."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", field
        child = tree.get(name)
        bases = component_bases(field.annotation)
        if isinstance(child, Mapping) and bases:
            key = f"{prefix}{name}"
            yield f"{key}._target_", FieldInfo(annotation=str)
            yield from config_keys(
                child, builder.kind(child, bases, key), builder, f"{key}."
            )


def unknown_key(
    key: str,
    known: Mapping[str, FieldInfo],
    chosen: Mapping[str, str],
    choices: Choices,
) -> Mistake:
    """Return an error for an unknown key that suggests a similar key
    or another option."""
    original_key = key
    parent, _, last = key.rpartition(".")

    # suggest a key of the same name in another group; prefer the fewest dots
    same_name = [other for other in known if other.split(".")[-1] == last]
    if same_name:
        closest = min(same_name, key=nesting_depth)
        return Mistake(f"{key}: there is no such key; did you mean '{closest}'?")

    # suggest this package's key for a name from another library
    equivalent = KEYS.get(last.lower(), "")
    if equivalent and parent in {"", equivalent.rpartition(".")[0]}:
        if equivalent in {*known, *chosen} or "=" in equivalent:
            return Mistake(f"{key}: there is no such key; did you mean '{equivalent}'?")
        key = equivalent

    suggestion = option_with_key(key, chosen, choices)
    if suggestion is not None:
        return Mistake(f"{original_key}: {suggestion}")
    hint = spelling_hint(key, known)
    if not hint:
        return UnknownKey(f"{key}: there is no such key")
    return Mistake(f"{key}: there is no such key{hint}")


def option_with_key(
    key: str, chosen: Mapping[str, str], choices: Choices
) -> str | None:
    """Return a sentence that suggests another option, which has this key, or None.

    Prefer an option named like the key, then the option with the fewest keys."""
    last = key.rpartition(".")[2]
    elsewhere = [
        (group, option)
        for group, current in chosen.items()
        for option in choices.options(group)
        if option != current
        and {key, f"{group}.{key}"} & choices.keys(group, option).keys()
    ]
    if not elsewhere:
        return None
    group, option = min(
        elsewhere, key=lambda choice: (choice[1] != last, len(choices.keys(*choice)))
    )
    return (
        f"{group}={chosen[group]} has no such key, {group}={option} has it; did you mean "
        f"'{group}={option} {group}.{last}=…'?"
    )


def spelling_hint(key: str, known: Collection[str]) -> str:
    """Return a hint that suggests the key with the most similar spelling, or lists the
    keys of the group, or "".

    Compare the last part of a key in a group with the keys of the group, and a key
    without a group with the last parts of all keys. If the group is unknown, compare
    full keys."""
    parent, _, last = key.rpartition(".")
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    by_depth = sorted(siblings if parent else known, key=nesting_depth, reverse=True)
    candidates = {other.split(".")[-1]: other for other in by_depth}
    closest = get_close_matches(last, candidates, n=1, cutoff=0.5)
    if closest:
        return f"; did you mean '{candidates[closest[0]]}'?"
    if not candidates:
        return nearest(key, known)
    sibling_keys = [other for other in siblings if not other.endswith("_target_")]
    return f"; its keys are {', '.join(sibling_keys)}" if sibling_keys else ""


def nesting_depth(key: str) -> int:
    """Return the number of groups around a key."""
    return key.count(".")
