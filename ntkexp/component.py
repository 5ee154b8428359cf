"""A component is a value: a frozen, typed set of fields, which are its keys in YAML.

Every choice an experiment makes (a model, a loss, an optimizer, …) is a subclass of that choice's `Abstract…` base,
named by `_target_` in one YAML file. There is no registry: the class path is the name.

>>> class Point(Component):
...     x: float = 0.0
>>> Point(x=2).fields()
{'_target_': 'ntkexp.component.Point', 'x': 2.0}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Component(BaseModel):
    """A frozen value whose fields are its configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    def files(self) -> tuple[Path, ...]:
        """The files this component reads; their contents belong to the identity of a run."""
        return ()

    def code(self) -> tuple[Path, ...]:
        """The Python files this component runs; the command line wants them trusted."""
        return ()

    def fields(self) -> dict[str, Any]:
        """The component as plain data, `_target_` first and every default filled in."""
        target = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"_target_": target} | {name: plain(getattr(self, name)) for name in type(self).model_fields}


def plain(value: Any) -> Any:
    """A field's value as JSON knows it."""
    if isinstance(value, Component):
        return value.fields()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
