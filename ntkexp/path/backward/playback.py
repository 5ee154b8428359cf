"""A recorded trajectory as a stream of steps, which may be gone over in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ntkexp.path.backward.recording import Recording
from ntkexp.path.network_view import NetworkView
from ntkexp.path.points import Points
from ntkexp.path.step import Step
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class Playback:
    """The steps that were recorded, with what is not in their rows."""

    recording: Recording
    points: Points
    step_sizes: Sequence[float]
    factors: Mapping[str, float]
    weight_decay: float

    def __iter__(self) -> Iterator[Step]:
        """The steps from the first to the last; each begins at the very weights that the one before ends at."""
        start = None
        for index in range(len(self.step_sizes)):
            step = self.step(index, start=start)
            yield step
            start = step.end

    def step(self, index: int, *, start: Weights | None = None, end: Weights | None = None) -> Step:
        """One of them; an end that is known already is taken as it is, with the tapes that are kept of it."""
        recorded = self.recording.read(index)
        return Step(
            index=index,
            view=NetworkView(self.points, start or recorded.weights),
            end=end or self.recording.read(index + 1).weights,
            output_gradient=recorded.output_gradient,
            step_size=self.step_sizes[index],
            factors=self.factors,
            weight_decay=self.weight_decay,
            memory=recorded.memory,
        )
