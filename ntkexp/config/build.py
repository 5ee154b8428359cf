"""Plain data → components, from the leaves up: `_target_` leads to a class, pydantic validates what goes into it.

`_target_: ntkexp.model.MLP` → the class, provided that it is a component of the right kind and may be imported. A
component of this package goes by its package, which imports the file of that class and no other; one from elsewhere
goes by its module, `package.module.Class`. Importing runs code, so only this package is imported unasked; others, a
package or a file my_net.py, if trusted.

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
from ntkexp.model.foreign import admit_module, let_import, load_module
from ntkexp.naming import LAZY_PACKAGES, PACKAGE, class_path, is_in_this_package, module_of_class

ROOT = Path(__file__).parents[2]
"""Where this package lies."""

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
    folder = ROOT.joinpath(*parent.split("."))
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
        hint = (
            "" if module_name in LAZY_PACKAGES else nearest(name, dir(module))
        )  # a lazy package says it by itself
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
        folder = ROOT.joinpath(
            *parent.split(".")
        )  # if it is one of this package, its parts may be meant
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
    """Some component of a kind, to be named in advice."""
    concrete = [kind for kind in base.__subclasses__() if can_be_built(kind)] or [base]
    return class_path(concrete[0])


# --- Code of the user's, which runs only if it is trusted.


def admit(entries: Sequence[str]) -> tuple[str, ...]:
    """The packages and files that the user trusts, imported, by the name under which a `_target_` finds them."""
    return tuple(
        admit_file(Path(entry)) if entry.endswith(".py") else admit_package(entry)
        for entry in entries
    )


def admit_package(name: str) -> str:
    """A package that Python finds, or that lies in the working folder."""
    first = name.partition(".")[0]
    try:
        if first not in sys.modules and find_spec(first) is None:
            let_import(admit_module(first, [Path.cwd()]), [Path.cwd()])
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
    """Import a file under its name without the ending; what goes wrong in it is said with its line."""
    file = Path(os.path.realpath(file.expanduser()))  # also of a link to itself
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
    """Code runs only if it lies in a trusted file, or in a trusted package."""
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
    """A function of the user's, FILE.py:FUNCTION, in a file that is trusted."""
    from ntkexp.model.libraries import Module, file_and_function, find_function  # noqa: PLC0415  few commands need them

    place = Module(path=path)
    refuse_untrusted(place, key, admit(trust))
    return find_function(
        load_module(place.file, f"{key}={path}"), file_and_function(path)[2], f"{key}={path}"
    )


# --- Components, built from the leaves up.


def build(fields: Mapping[str, Any], trusted: tuple[str, ...] = ()) -> Experiment:
    return Builder(trusted).experiment(fields)


@dataclass(frozen=True)
class Builder:
    """A builder knows the components of this package and the trusted ones; names of options stand for their files."""

    trusted: tuple[str, ...] = ()
    choices: Choices = dataclasses_field(default_factory=lambda: Choices(config_folders(None)))
    files: dict[tuple[str, str], dict[str, Any]] = dataclasses_field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def groups(self) -> frozenset[str]:
        """The groups there are, looked up once: a sweep builds a thousand experiments."""
        return frozenset(self.choices.groups())

    def experiment(self, tree: Mapping[str, Any]) -> Experiment:
        made = self.component(tree, (Experiment,), "")
        assert isinstance(made, Experiment)
        return made

    def component(
        self, node: Mapping[str, Any], bases: tuple[type[Component], ...], key: str
    ) -> Component:
        """Build a node, its children first."""
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
        """The class of a node; it goes without saying where only one is possible."""
        base = next((one for one in bases if class_path(one) == node.get("_target_")), bases[0])
        if "_target_" in node:
            return component_class(node["_target_"], base, key, self.trusted)
        if not can_be_built(base):
            raise Mistake(
                f"{key} has no _target_, so it is not of class {base.__name__}; name one, such as {example_path(base)}"
            )
        return base

    def child(self, value: Any, field: FieldInfo | None, key: str) -> Any:
        """What goes into a field; pydantic refuses whatever has no field."""
        if field is None:
            return value
        plain, wanted = set(plain_types(field.annotation)), component_bases(field.annotation)
        if (
            isinstance(value, bool) and plain & {int, float} and bool not in plain
        ):  # to Python, true is a number
            raise Mistake(f"{key}={spell_value(value)}: it takes {accepted_values(field)}")
        if not wanted:
            return value
        if isinstance(value, str | Mapping) and is_list(field.annotation):
            value = [value]
        return self.components(value, wanted, key)

    def components(self, value: Any, bases: tuple[type[Component], ...], key: str) -> Any:
        """Put components in place of their descriptions or names; the file of an option is read once."""
        if isinstance(value, Mapping):
            return (
                parse_layer(value, key) if names_layer(value) else self.component(value, bases, key)
            )
        if isinstance(value, list | tuple):
            return tuple(self.components(item, bases, key) for item in value)
        group = class_path(bases[0]).split(".")[
            -2
        ]  # the package, whose options are files of the group
        if not (isinstance(value, str) and group in self.groups):
            return value
        try:
            if (group, value) not in self.files:
                self.files[group, value] = read_yaml(self.choices.file(group, value))
        except Mistake as mistake:
            raise Mistake(f"{key}: {mistake}") from None
        return self.component(self.files[group, value], bases, key)


# --- Which keys there are, given what is chosen, and what an unknown one was probably meant to be.


def config_keys(
    tree: Mapping[str, Any], kind: type[Component], builder: Builder, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key under the chosen components, with its field."""
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
    """Advice for a key that there is not: where else a key of its name is, or the nearest spelling."""
    given, (parent, _, last) = key, key.rpartition(".")

    # Known in another group: of two the one in fewer groups is meant.
    named = sorted((other for other in known if other.split(".")[-1] == last), key=nesting_depth)
    if named:
        return Mistake(f"{key}: there is no such key; did you mean '{named[0]}'?")

    # What others call it.
    meant = KEYS.get(last.lower(), "")
    if meant and parent in {"", meant.rpartition(".")[0]}:
        if meant in {*known, *chosen} or "=" in meant:
            return Mistake(f"{key}: there is no such key; did you mean '{meant}'?")
        key, (parent, _, last) = meant, meant.rpartition(".")

    # Known of options that are not chosen: of several the one of that name is meant, else the plainest.
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

    # The nearest: beside it if its group exists, by the last part if it names no group, else in full.
    beside = [other for other in known if other.rpartition(".")[0] == parent]
    candidates = {
        other.split(".")[-1]: other
        for other in sorted(beside if parent else known, key=nesting_depth, reverse=True)
    }
    if near := get_close_matches(last, candidates, n=1, cutoff=0.5):
        hint = f"; did you mean '{candidates[near[0]]}'?"
    else:
        listed = [other for other in beside if not other.endswith("_target_")]
        hint = ("" if candidates else nearest(key, known)) or (
            f"; its keys are {', '.join(listed)}" if listed else ""
        )
    return (
        Mistake(f"{key}: there is no such key{hint}")
        if hint
        else UnknownKey(f"{key}: there is no such key")
    )


def nesting_depth(key: str) -> int:
    """How many groups a key lies in; of two that fit, the shallower is meant."""
    return key.count(".")
