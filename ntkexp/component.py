"""A component is a value: a frozen, typed set of fields, which are its keys in YAML.

Every choice an experiment makes (a model, a loss, an optimizer, …) is a subclass of that choice's `Abstract…` base,
named by `_target_` in one YAML file, which is called as the component is: there is no registry.

>>> from ntkexp.path.rule.base import Secant
>>> Secant().fields(), Secant().option
({'_target_': 'ntkexp.path.rule.Secant'}, 'secant')
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from ntkexp.naming import class_path, option_name

# Beyond these ends no machine holds or finishes a count, and arithmetic fails before memory does. They are far from
# what is reasonable: what fits between them is measured against `memory_gb`, and against time.
LARGEST = 10**7
DEEPEST = 1000
LONGEST = 10**12

Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
"""Of examples, units, features."""

CountOrNone: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
"""The same, or none."""

Depth: TypeAlias = Annotated[int, Field(ge=1, le=DEEPEST)]
"""Of layers one after the other, or pixels of a window."""

Steps: TypeAlias = Annotated[int, Field(ge=1, le=LONGEST)]
"""Of an optimizer."""


class Component(BaseModel):
    """A frozen value whose fields are its configuration."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )

    @property
    def option(self) -> str:
        """The component has this name: in tables, in names of folders, and where it is asked for."""
        return option_name(class_path(type(self)))

    def files(self) -> tuple[Path, ...]:
        """The files this component reads; their contents belong to the identity of a run."""
        return ()

    def code(self) -> tuple[Path, ...]:
        """The Python files this component runs; the command line wants them trusted."""
        return ()

    def fields(self) -> dict[str, Any]:
        """The component is plain data, `_target_` first and every default filled in."""
        return {"_target_": class_path(type(self))} | {
            name: plain(getattr(self, name)) for name in type(self).model_fields
        }


def can_be_built(kind: type[Component]) -> bool:
    """Whether a kind of component is none that only others are made from."""
    return not (inspect.isabstract(kind) or kind.__name__.startswith("Abstract"))


def plain(value: Any) -> Any:
    """The value of a field as JSON knows it."""
    if isinstance(value, Component):
        return value.fields()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
