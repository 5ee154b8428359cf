"""Retracing: the second pass over a run whose optimizer remembers, from its last step to its first.

The attributed points are taken a chunk at a time, so many that their brackets fit into the memory; every chunk walks
the whole recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.secant.segment import Segment
from ntkexp.path.accumulate.integrals import Integrals, Tally
from ntkexp.path.accumulate.ledger import Error, Hindsight
from ntkexp.path.backward.backward import Backward, StepBack
from ntkexp.path.backward.doubled import Doubled, sampled
from ntkexp.path.backward.half_times import Halves, empty
from ntkexp.path.backward.recording import Recording
from ntkexp.path.descent import sizes
from ntkexp.path.points import Block, Points, cut
from ntkexp.run.setting import Setting
from ntkexp.run.state import Walk, opened
from ntkexp.shapes import Weights

DOUBLED = "doubled"  # no rule's name


def retraced(walk: Walk, recording: Recording) -> Retrace:
    """The second pass before its first step back."""
    setting, integrals = walk.setting, opened(walk.setting)
    like = setting.kernel.new_zeros(len(setting.attributed), *setting.path_shape[1:3])
    return Retrace(
        walk,
        recording,
        integrals,
        {name: [Tally() for _ in walk.step_sizes] for name in integrals},
        {name: empty(walk.step, like) for name in integrals},
        doubled(setting),
    )


def doubled(setting: Setting) -> Doubled | None:
    """The measure of the parts by secants, at nothing; none where nobody asks for it."""
    path, shape = setting.experiment.path, setting.path_shape
    if path.closing is None or not path.finer:
        return None
    sample = sampled(len(setting.attributed), path.error_samples).to(setting.attributed.device)
    room = (setting.kernel.new_zeros(len(sample), *shape[1:axes]) for axes in (4, 3, 2))
    return Doubled(path.closing.option, Integrals(path.finer, *room), sample, path.gain)


@dataclass
class Retrace:
    """Where the second pass stands: `done` steps back, over all chunks."""

    walk: Walk
    recording: Recording
    integrals: dict[str, Integrals]
    tallies: dict[str, list[Tally]]  # for every step
    halves: dict[str, Halves]  # at the attributed points
    doubled: Doubled | None
    done: int = 0
    points: Points | None = None  # of the chunk at work
    end: Weights | None = None  # where the next step back comes from, if it is known
    backward: dict[str, Backward] = field(default_factory=dict)
    saved: dict[str, list[Tensor]] = field(default_factory=dict)  # brackets of a checkpoint

    @property
    def chunks(self) -> list[slice]:
        """The attributed points, cut so that the brackets of a chunk fit into the memory."""
        return cut(0, len(self.walk.setting.attributed), self.walk.setting.chunk)

    @property
    def steps(self) -> int:
        """How many steps back there are."""
        return len(self.chunks) * self.walk.step

    def steps_back(self) -> Iterator[int]:
        """Take those that are left, one at a time; how many are done."""
        while self.done < self.steps:
            chunk, turn = divmod(self.done, self.walk.step)
            if turn == 0 or self.points is None:
                self.points, self.end = self.begin_chunk(self.chunks[chunk]), None
            self.end = self.step_back(self.walk.step - 1 - turn, self.points)
            self.done += 1
            yield self.done

    def begin_chunk(self, chunk: slice) -> Points:
        """Empty brackets (or those of a checkpoint), for the points of a chunk."""
        setting = self.walk.setting
        place = setting.attributed[chunk]
        self.backward = {
            name: Backward(integrals, place, self.saved.get(name, [])) for name, integrals in self.integrals.items()
        }
        inputs = setting.points.inputs[place]
        points = replace(setting.points, inputs=inputs, train=0, block=len(inputs), keep=True, shelves=[])
        if self.doubled is not None:
            self.doubled.begin(chunk, points, self.saved.get(DOUBLED, []))
        self.saved = {}
        return points

    def step_back(self, index: int, points: Points) -> Weights:
        """One step back, towards the weights that it began at."""
        descent, training = self.walk.setting.descent, self.walk.setting.points
        start, memory = self.recording.read(index)
        segment = Segment(start, self.end or self.recording.read(index + 1)[0], training.reader.trained)
        tapes = [training.tape(start, block) for block in training.train_blocks]
        outputs = torch.cat([tape.outputs for tape in tapes])
        step_sizes = sizes(descent.factors, descent.size(index))
        step = StepBack(
            step_sizes,
            descent.optimizer.recursion(index, start, step_sizes, memory),
            segment,
            [training.reader.tangent(tape) for tape in tapes],
            descent.output_gradient(index, outputs) * self.walk.clippings[index],
            descent.optimizer.weight_decay,
            descent.optimizer.decouples,
        )
        block = Block(points, segment, slice(0, len(points.inputs)))
        chunk = self.chunks[self.done // self.walk.step]
        for name, backward in self.backward.items():
            self.halves[name].add(index, chunk, backward.add(step, block, self.tallies[name][index]))
        if self.doubled is not None:
            self.doubled.add(step)
        return start

    @property
    def hindsight(self) -> dict[str, Hindsight]:
        """What the second pass has found out of the parts beside them, by rule."""
        setting = self.walk.setting
        found = {}
        for name, integrals in self.integrals.items():
            half_by = torch.full_like(integrals.contributions, torch.nan)
            half_by[setting.attributed] = self.halves[name].by(self.walk.step_sizes)
            error = None
            if self.doubled is not None and name == self.doubled.rule:
                error = Error(self.doubled.error(integrals.contributions[setting.attributed]))
            found[name] = Hindsight(error, half_by)
        return found

    def tallied(self, step: int) -> dict[str, Tally]:
        """What the gradients of a step did, by rule."""
        return {name: tallies[step] for name, tallies in self.tallies.items()}

    @property
    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain data and tensors."""
        return {
            "done": self.done,
            "integrals": {name: integrals.state for name, integrals in self.integrals.items()},
            "brackets": {name: backward.state for name, backward in self.backward.items()},
            "halves": {name: halves.state for name, halves in self.halves.items()},
            "doubled": None if self.doubled is None else self.doubled.state,
            "tallies": {name: [asdict(tally) for tally in tallies] for name, tallies in self.tallies.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood."""
        self.done = state["done"]
        for name, integrals in self.integrals.items():
            integrals.restore(state["integrals"][name])
            self.tallies[name] = [Tally(**tally) for tally in state["tallies"][name]]
            self.halves[name].restore(state["halves"][name])
        brackets = dict(state["brackets"])
        if self.doubled is not None:
            brackets[DOUBLED] = self.doubled.restore(state["doubled"])
        self.saved = brackets if self.done % self.walk.step else {}
