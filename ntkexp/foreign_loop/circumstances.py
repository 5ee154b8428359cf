"""The circumstances of a call: what it depends on besides weights and inputs.

Layers are in training mode or in evaluation, most of them as the whole model is. Generators begin in a state, of which
a call that draws nothing knows nothing. And products may be formed in shorter numbers, under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any

from torch import Tensor, nn

from ntkexp.foreign_loop.autocast import Autocast
from ntkexp.foreign_loop.generators import beginning_at, states_for, that_moved


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
    """The modes, the states of the generators that were drawn from, by their devices, and the casts."""

    modes: LayerModes = EVALUATION
    states: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Autocast | None = None

    @classmethod
    def of(cls, module: nn.Module, before: Mapping[str, Tensor], autocast: Autocast | None) -> Circumstances:
        """Those of a call that has come back, before which generators were in these states."""
        return cls(LayerModes.of(module), that_moved(before, states_for(module)), autocast)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw and cast as then; modes are the module's affair."""
        with beginning_at(self.states), nullcontext() if self.autocast is None else self.autocast.again():
            yield

    @property
    def kept(self) -> dict[str, object]:
        """All of it as plain content."""
        otherwise = sorted(self.modes.otherwise)
        casts = None if self.autocast is None else list(astuple(self.autocast))
        return {"trains": self.modes.trains, "otherwise": otherwise, "states": dict(self.states), "casts": casts}

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> Circumstances:
        """The same from what was kept."""
        states = {place: state.clone() for place, state in kept.get("states", {}).items()}
        modes, casts = LayerModes(kept.get("trains", False), frozenset(kept.get("otherwise", ()))), kept.get("casts")
        return cls(modes, states, None if casts is None else Autocast(*casts))
