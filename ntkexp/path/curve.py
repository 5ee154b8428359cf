"""The way of a step that is not straight: arcs in weight space, with Gauss nodes on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from ntkexp.optimizer.arc import Arc
from ntkexp.path.network_view import NetworkView
from ntkexp.path.points import Points
from ntkexp.path.rule.gauss import Gauss


class Node(NamedTuple):
    """A place on an arc, how much of the step the arc takes and how much of the arc the place counts."""

    length: float
    weight: float
    view: NetworkView
    output_gradient: Float[Tensor, "train out"]


@dataclass(frozen=True)
class Curve:
    """The arcs of a step, and ℓ′ as a function of the outputs at the training examples."""

    arcs: tuple[Arc, ...]
    points: Points
    output_gradient: Callable[[Float[Tensor, "train out"]], Float[Tensor, "train out"]]

    def nodes(self, count: int) -> Iterator[Node]:
        """So many Gauss nodes on every arc, in the order of time."""
        quadrature = Gauss().quadrature(count, 1, 0)
        for arc in self.arcs:
            for piece in quadrature:
                view = NetworkView(self.points, arc.at(piece.start))
                yield Node(arc.length, piece.weight, view, self.output_gradient(view.train_outputs))
