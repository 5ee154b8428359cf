"""A call of the model as functions of the user's see it: those that name its examples, and those that give losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ntkexp.model.functional import arguments
from ntkexp.shapes import Inputs


@dataclass(frozen=True)
class SeenCall:
    """What the model was called with, and the names of its examples, once they have some."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Inputs, ids: tuple[str, ...] = ()) -> SeenCall:
        """The call with these inputs.

        >>> SeenCall.of((1, 2)).args, SeenCall.of({"x": 3}).kwargs["x"]
        ((1, 2), 3)
        """
        placed, named = arguments(inputs)
        return cls(placed, named, ids)
