"""Plain data → components, from the leaves up: pydantic validates, and each refusal becomes one line.

>>> from ntkexp.loss.base import AbstractLoss
>>> Builder().component({"_target_": "ntkexp.loss.Squared", "reduction": "sum"}, (AbstractLoss,), "loss")
Squared(reduction='sum')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ntkexp.chapter import public
from ntkexp.component import Component, can_be_built
from ntkexp.config import target
from ntkexp.config.as_text import spelled
from ntkexp.config.choices import Choices, read
from ntkexp.config.field_types import bases, is_list, kinds, takes
from ntkexp.config.folders import folders
from ntkexp.config.validation import refusal
from ntkexp.experiment.experiment import Experiment
from ntkexp.layer.spec import layer, names_layer
from ntkexp.mistake import Mistake


def build(fields: Mapping[str, Any], trusted: tuple[str, ...] = ()) -> Experiment:
    """Build the experiment that `Experiment.fields` describes."""
    return Builder(trusted).experiment(fields)


@dataclass(frozen=True)
class Builder:
    """A builder knows the components of this package and the trusted ones; names of options stand for their files."""

    trusted: tuple[str, ...] = ()
    choices: Choices = field(default_factory=lambda: Choices(folders(None)))
    files: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def groups(self) -> frozenset[str]:
        """The groups there are, looked up once: a sweep builds a thousand experiments."""
        return frozenset(self.choices.groups())

    def experiment(self, tree: Mapping[str, Any]) -> Experiment:
        """Build the root."""
        made = self.component(tree, (Experiment,), "")
        assert isinstance(made, Experiment)
        return made

    def kind(self, node: Mapping[str, Any], wanted: tuple[type[Component], ...], key: str) -> type[Component]:
        """Find the class of a node; it goes without saying where only one is possible."""
        base = next((one for one in wanted if public(one) == node.get("_target_")), wanted[0])
        if "_target_" in node:
            return target.component(node["_target_"], base, key, self.trusted)
        if not can_be_built(base):
            raise Mistake(
                f"{key} has no _target_, so it is no {base.__name__}; name one, such as {target.example(base)}"
            )
        return base

    def component(self, node: Mapping[str, Any], wanted: tuple[type[Component], ...], key: str) -> Component:
        """Build a node, its children first."""
        kind = self.kind(node, wanted, key)
        given = {str(name): value for name, value in node.items() if name != "_target_"}
        children = {
            name: self.child(value, kind.model_fields.get(name), f"{key}.{name}".removeprefix("."))
            for name, value in given.items()
        }
        try:
            made = kind.model_validate(children)
        except ValidationError as error:
            raise refusal(error, kind, key, given) from None
        target.refuse_untrusted(made, key, self.trusted)
        return made

    def child(self, value: Any, place: FieldInfo | None, key: str) -> Any:
        """What goes into a field; pydantic refuses whatever has no field."""
        if place is None:
            return value
        plain, wanted = set(kinds(place.annotation)), bases(place.annotation)
        if isinstance(value, bool) and plain & {int, float} and bool not in plain:  # to Python, true is a number
            raise Mistake(f"{key}={spelled(value)}: it takes {takes(place)}")
        if not wanted:
            return value
        if isinstance(value, str | Mapping) and is_list(place.annotation):
            value = [value]
        return self.made(value, wanted, key)

    def made(self, value: Any, wanted: tuple[type[Component], ...], key: str) -> Any:
        """Put components in place of their descriptions or names."""
        group = public(wanted[0]).split(".")[-2]  # the chapter, whose options are files of the group
        if isinstance(value, Mapping):
            return layer(value, key) if names_layer(value) else self.component(value, wanted, key)
        if isinstance(value, list | tuple):
            return tuple(self.made(item, wanted, key) for item in value)
        if isinstance(value, str) and group in self.groups:
            return self.component(self.option(group, value, key), wanted, key)
        return value

    def option(self, group: str, name: str, key: str) -> dict[str, Any]:
        """What an option's file holds; each is read once."""
        try:
            if (group, name) not in self.files:
                self.files[group, name] = read(self.choices.file(group, name))
        except Mistake as mistake:
            raise Mistake(f"{key}: {mistake}") from None
        return self.files[group, name]
