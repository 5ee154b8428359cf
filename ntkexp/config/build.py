"""Build components from plain data. Nested components are built first.

`_target_: ntkexp.model.MLP` names the class of a component. pydantic validates its fields. The name
of a component of this package omits the file; the package then imports only the file of that class.
Other components are named `package.module.Class`. Importing runs code, so the user must trust other
packages and files (such as my_net.py) first.

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
from dataclasses import dataclass
from dataclasses import field as dataclasses_field
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
from ntkexp.mistake import Mistake, UnknownKey, Untrusted, WrongArgument, nearest
from ntkexp.model.foreign import allow_imports, allow_module, load_module
from ntkexp.naming import LAZY_PACKAGES, PACKAGE, class_path, is_in_this_package, module_of_class

SOURCE_FOLDER = Path(__file__).parents[2]
"""The folder that contains this package."""

# --- Classes by their names.


def component_class(
    target: object, base: type[Component], key: str, trusted: Collection[str] = ()
) -> type[Component]:
    given = f"{key}._target_={target}".removeprefix(".")
    module_name, _, name = str(target).rpartition(".")
    if (
        not isinstance(target, str)
        or not all(part.isidentifier() for part in target.split("."))
        or not module_name
    ):
        raise Mistake(f"{given} names no class; write package.module.Class")
    if not any(f"{module_name}.".startswith(f"{package}.") for package in (PACKAGE, *trusted)):
        package = module_name.split(".")[0]
        raise Untrusted(
            f"{given} lies outside {PACKAGE}, and is imported only if you say so", package
        )
    parent, _, file = module_name.rpartition(".")
    folder = SOURCE_FOLDER.joinpath(*parent.split("."))
    if (
        is_in_this_package(module_name)
        and (folder / f"{file}.py").is_file()
        and import_module(parent).__name__ in LAZY_PACKAGES
    ):
        classes = [f"{parent}.{kind}" for kind in module_of_class((str(folder),))]
        raise Mistake(
            f"{given}: name classes by their package, not by their file{nearest(f'{parent}.{name}', classes)}"
        )
    module = import_named(module_name, given)
    try:
        kind = getattr(module, name)
    except AttributeError as error:
        # a package that loads its classes lazily raises an error that names the nearest class
        hint = "" if module_name in LAZY_PACKAGES else nearest(name, dir(module))
        raise Mistake(f"{given}: {error}{hint}") from None
    if not (isinstance(kind, type) and issubclass(kind, base) and can_be_built(kind)):
        raise Mistake(
            f"{given} is not a class of {base.__name__} that can be built; choose one, such as {example_path(base)}"
        )
    return kind


def import_named(name: str, given: str) -> ModuleType:
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
        raise Mistake(f"{given}: there is no module {error.name}{hint}") from None
    except Exception as error:
        if name.split(".", maxsplit=1)[0] == PACKAGE:
            raise
        raise Mistake(
            f"{given}: {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def example_path(base: type[Component]) -> str:
    """Return the name of any concrete subclass of `base`, as an example in error messages."""
    concrete = [kind for kind in base.__subclasses__() if can_be_built(kind)] or [base]
    return class_path(concrete[0])


# --- Python code of the user, which runs only if it is trusted.


def admit(entries: Sequence[str]) -> tuple[str, ...]:
    """Import the files that the user trusts, and check that the packages can be imported.

    Return the module names to use in a `_target_`.
    """
    return tuple(
        admit_file(Path(entry)) if entry.endswith(".py") else admit_package(entry)
        for entry in entries
    )


def admit_package(name: str) -> str:
    """Check that a trusted package can be imported, from sys.path or the working folder.

    Return its name, or raise.
    """
    first = name.partition(".")[0]
    try:
        if first not in sys.modules and find_spec(first) is None:
            allow_imports(allow_module(first, [Path.cwd()]), [Path.cwd()])
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise WrongArgument(
            f"trust={name}: there is no such package; it takes a package's name, or a file my_net.py",
            "trust",
        )
    return name


def admit_file(file: Path) -> str:
    """Import a file as a module named after the file. Errors name the line in the file."""
    file = Path(os.path.realpath(file.expanduser()))  # Path.resolve fails for a link to itself
    given = f"trust={file}"
    if not file.is_file():
        raise WrongArgument(
            f"{given}: there is no such file; it takes the name of a package, or a file my_net.py",
            "trust",
        )
    if file.stem == PACKAGE:
        raise WrongArgument(
            f"{given}: '{PACKAGE}' cannot be the name of a new module; give the file another name",
            "trust",
        )
    try:
        return load_module(file, given).__name__
    except Mistake as mistake:
        raise WrongArgument(str(mistake), "trust") from mistake


def refuse_untrusted(component: Component, key: str, trusted: Collection[str]) -> None:
    """Raise if a component runs code outside the trusted files and packages."""
    specs = [spec for name in trusted if component.code() and (spec := find_spec(name)) is not None]
    places = [
        Path(folder).resolve() for spec in specs for folder in spec.submodule_search_locations or ()
    ]
    for file in component.code():
        place = file.resolve()
        if not (
            any(spec.origin == str(place) for spec in specs)
            or any(map(place.is_relative_to, places))
        ):
            raise Untrusted(
                f"{key}: {file} is Python code of yours, which runs only if you say so",
                quote(str(file)),
            )


def load_function(path: str, key: str, trust: Sequence[str]) -> Callable[..., Any]:
    """Return a function of the user, FILE.py:FUNCTION, from a trusted file."""
    from ntkexp.model.libraries import Module, file_and_function, find_function  # noqa: PLC0415  few commands need them

    place = Module(path=path)
    refuse_untrusted(place, key, admit(trust))
    return find_function(
        load_module(place.file, f"{key}={path}"), file_and_function(path)[2], f"{key}={path}"
    )


# --- Components. Nested components are built first.


def build(fields: Mapping[str, Any], trusted: tuple[str, ...] = ()) -> Experiment:
    return Builder(trusted).experiment(fields)


@dataclass(frozen=True)
class Builder:
    """A builder of components from this package and from trusted code.

    A field of components also takes the names of options, such as `path.rule=[secant]`. The builder
    reads the YAML files of these options.
    """

    trusted: tuple[str, ...] = ()
    choices: Choices = dataclasses_field(default_factory=lambda: Choices(config_folders(None)))
    files: dict[tuple[str, str], dict[str, Any]] = dataclasses_field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of all groups, cached because a sweep may build a thousand experiments."""
        return frozenset(self.choices.groups())

    def experiment(self, tree: Mapping[str, Any]) -> Experiment:
        made = self.component(tree, (Experiment,), "")
        assert isinstance(made, Experiment)
        return made

    def component(
        self, node: Mapping[str, Any], bases: tuple[type[Component], ...], key: str
    ) -> Component:
        """Build a component and, before it, the components in its fields."""
        kind = self.kind(node, bases, key)
        given = {str(name): value for name, value in node.items() if name != "_target_"}
        children = {
            name: self.child(value, kind.model_fields.get(name), f"{key}.{name}".removeprefix("."))
            for name, value in given.items()
        }
        try:
            made = kind.model_validate(children)
        except ValidationError as error:
            raise refusal(error, kind, key, given) from None
        refuse_untrusted(made, key, self.trusted)
        return made

    def kind(
        self, node: Mapping[str, Any], bases: tuple[type[Component], ...], key: str
    ) -> type[Component]:
        """Return the component class of a mapping. If the expected class is concrete, `_target_`
        may be missing.
        """
        base = next((one for one in bases if class_path(one) == node.get("_target_")), bases[0])
        if "_target_" in node:
            return component_class(node["_target_"], base, key, self.trusted)
        if not can_be_built(base):
            raise Mistake(
                f"{key} has no _target_, so it is not of class {base.__name__}; name one, such as {example_path(base)}"
            )
        return base

    def child(self, value: Any, field: FieldInfo | None, key: str) -> Any:
        """Return the value of a field. Build all components in it."""
        if field is None:  # an unknown field: pydantic raises an error
            return value
        plain = set(plain_types(field.annotation))
        wanted = component_bases(field.annotation)
        # pydantic would convert true to the number 1
        if isinstance(value, bool) and plain & {int, float} and bool not in plain:
            raise Mistake(f"{key}={spell_value(value)}: it takes {accepted_values(field)}")
        if not wanted:
            return value
        if isinstance(value, str | Mapping) and is_list(field.annotation):
            value = [value]
        return self.components(value, wanted, key)

    def components(self, value: Any, bases: tuple[type[Component], ...], key: str) -> Any:
        """Build a component from a mapping or the name of an option, or several from a list."""
        if isinstance(value, Mapping):
            if names_layer(value):
                return parse_layer(value, key)
            return self.component(value, bases, key)
        if isinstance(value, list | tuple):
            return tuple(self.components(item, bases, key) for item in value)
        group = class_path(bases[0]).split(".")[-2]  # a package is named like its group
        if not (isinstance(value, str) and group in self.groups):
            return value
        if group == "diagnostic" and ".py" in value:  # FILE.py:FUNCTION
            target = {"_target_": f"{PACKAGE}.diagnostic.UserFunction", "path": value}
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
        child, wanted = tree.get(name), component_bases(field.annotation)
        if isinstance(child, Mapping) and wanted:
            key = f"{prefix}{name}"
            yield f"{key}._target_", FieldInfo(annotation=str)
            yield from config_keys(child, builder.kind(child, wanted, key), builder, f"{key}.")


def unknown_key(
    key: str, known: Mapping[str, FieldInfo], chosen: Mapping[str, str], choices: Choices
) -> Mistake:
    """Return an error for an unknown key that suggests a similar key or another option."""
    given = key
    parent, _, last = key.rpartition(".")

    # suggest a key of the same name in another group; prefer the one with the fewest dots
    named = sorted((other for other in known if other.split(".")[-1] == last), key=nesting_depth)
    if named:
        return Mistake(f"{key}: there is no such key; did you mean '{named[0]}'?")

    # suggest this package's key for a name from another library
    meant = KEYS.get(last.lower(), "")
    if meant and parent in {"", meant.rpartition(".")[0]}:
        if meant in {*known, *chosen} or "=" in meant:
            return Mistake(f"{key}: there is no such key; did you mean '{meant}'?")
        key = meant
        parent, _, last = meant.rpartition(".")

    # suggest a key of another option; prefer an option named like the key, then the one with fewest
    # keys
    elsewhere = [
        (group, option)
        for group, current in chosen.items()
        for option in choices.options(group)
        if option != current and {key, f"{group}.{key}"} & choices.keys(group, option).keys()
    ]
    if elsewhere:
        group, option = min(
            elsewhere, key=lambda choice: (choice[1] != last, len(choices.keys(*choice)))
        )
        return Mistake(
            f"{given}: {group}={chosen[group]} has no such key, {group}={option} has it; "
            f"did you mean '{group}={option} {group}.{last}=…'?"
        )

    # suggest the most similar spelling: within the group, else by the last part of the key, else by
    # the full key
    beside = [other for other in known if other.rpartition(".")[0] == parent]
    candidates = {
        other.split(".")[-1]: other
        for other in sorted(beside if parent else known, key=nesting_depth, reverse=True)
    }
    if near := get_close_matches(last, candidates, n=1, cutoff=0.5):
        hint = f"; did you mean '{candidates[near[0]]}'?"
    else:
        hint = "" if candidates else nearest(key, known)
        listed = [other for other in beside if not other.endswith("_target_")]
        if listed and not hint:
            hint = f"; its keys are {', '.join(listed)}"
    if not hint:
        return UnknownKey(f"{key}: there is no such key")
    return Mistake(f"{key}: there is no such key{hint}")


def nesting_depth(key: str) -> int:
    """Return the number of groups around a key."""
    return key.count(".")
