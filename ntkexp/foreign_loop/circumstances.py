"""The circumstances of a call: what it depends on besides weights and inputs.

Layers are in training mode or in evaluation, most of them as the whole model is. Generators begin in a state, of which
a call that draws nothing knows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ntkexp.foreign_loop.generators import states_for, that_moved


@dataclass(frozen=True)
class LayerModes:
    """Whether the model trains, and the layers that do `otherwise`.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    >>> net[1].eval()
    Dropout(p=0.1, inplace=False)
    >>> LayerModes.of(net)
    LayerModes(trains=True, otherwise=frozenset({'1'}))
    """

    trains: bool = False
    otherwise: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> LayerModes:
        """Those of a module."""
        trains = module.training
        return cls(trains, frozenset(name for name, each in module.named_modules() if each.training != trains))

    def give(self, module: nn.Module) -> None:
        """Put a module in them."""
        for name, each in module.named_modules():
            each.training = self.trains != (name in self.otherwise)


EVALUATION = LayerModes()


@dataclass(frozen=True, eq=False)
class Circumstances:
    """The modes, and the states of the generators that were drawn from, by their devices."""

    modes: LayerModes = EVALUATION
    states: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, before: Mapping[str, Tensor]) -> Circumstances:
        """Those of a call that has come back, before which generators were in these states."""
        return cls(LayerModes.of(module), that_moved(before, states_for(module)))

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return sum(state.nbytes for state in self.states.values())

    @property
    def kept(self) -> dict[str, object]:
        """All of it as plain content."""
        otherwise = sorted(self.modes.otherwise)
        return {"trains": self.modes.trains, "otherwise": otherwise, "states": dict(self.states)}

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> Circumstances:
        """The same from what was kept."""
        states = {place: state.clone() for place, state in kept.get("states", {}).items()}
        return cls(LayerModes(kept.get("trains", False), frozenset(kept.get("otherwise", ()))), states)
