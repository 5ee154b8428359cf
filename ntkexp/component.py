"""Components: the models, losses, optimizers and other parts of an experiment.

A component is a frozen pydantic model. Its fields are keys in YAML files. Each kind of
component has a base class named `Abstract…`, and each option is a subclass. The YAML
file of an option names its class in `_target_`, so no registry is needed.

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

# Upper bounds of counts. No machine can handle larger counts, and arithmetic with them
# may overflow. For smaller counts, memory and duration are checked later.
MAX_COUNT = 10**7
MAX_DEPTH = 1000
MAX_STEPS = 10**12

Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A number of examples, units or features."""

CountOrNone: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count that may be zero."""

Depth: TypeAlias = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
"""A number of consecutive layers, or the length of a window in pixels."""

Steps: TypeAlias = Annotated[int, Field(ge=1, le=MAX_STEPS)]
"""A number of steps of an optimizer."""


class Component(BaseModel):
    """A frozen value whose fields are its configuration."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )

    @property
    def option(self) -> str:
        """The name of the component on the command line,
        in tables and in folder names."""
        return option_name(class_path(type(self)))

    def files(self) -> tuple[Path, ...]:
        """Return the files that this component reads.

        Their contents are part of a run's identity.
        """
        return ()

    def code(self) -> tuple[Path, ...]:
        """Return the Python files that this component runs.
        The user must have trusted them."""
        return ()

    def fields(self) -> dict[str, Any]:
        """Return the component as plain data: `_target_`,
        then all fields with their defaults."""
        return {"_target_": class_path(type(self))} | {
            name: plain(getattr(self, name)) for name in type(self).model_fields
        }


def can_be_built(kind: type[Component]) -> bool:
    """Return True if a component class is concrete."""
    return not (inspect.isabstract(kind) or kind.__name__.startswith("Abstract"))


def plain(value: Any) -> Any:
    """Convert the value of a field to types that JSON can store."""
    if isinstance(value, Component):
        return value.fields()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
