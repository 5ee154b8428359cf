"""What effects of this project say of a training: it is recorded as it goes, and swept back for what is asked.

`ntkexp train path.effects=true` does the same, for outputs alone, and with kernels on the way.
"""

from __future__ import annotations

import tempfile

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.plan import IN_CACHE
from ntkexp.effects.sweep import MEANS, sweep_from
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.path.points import Points
from ntkexp.path.recording import RecordedTraining, Recording, row_length
from ntkexp.path.step import Descent
from ntkexp.removal.rerun import Rerun
from tests.bench.attribution_scores import Asked, slopes
from tests.bench.backward import Deaf


def effects(rerun: Rerun, asked: Asked, *, one_step: bool) -> Float[Tensor, "point train"]:
    """What the sweep back says."""
    with tempfile.TemporaryDirectory() as folder:
        training = recorded(rerun, folder)
        vectors, together = slopes(asked, training.end), max(1, IN_CACHE // rerun.flat.size)
        sweep = sweep_from(training, vectors, MEANS["renormalised"], together, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(rerun: Rerun, folder: str) -> RecordedTraining:
    """Train, and keep every step in this folder."""
    optimizer, start, pull = rerun.optimizer, rerun.start, torch.zeros_like(rerun.targets)
    records = tuple(dict.fromkeys((*optimizer.records, *optimizer.differentiated)))
    rows = Deaf(folder).trajectory(rerun.length + 1, row_length(start, records, pull))
    recording = Recording(rows=rows, like=start, records=records, pull=pull)
    descent, end = descent_of(rerun), start
    for step in descent.walk(start):
        recording.write(step)
        end = step.end
    recording.close(rerun.length, end)
    sizes = [rerun.size(step) for step in range(rerun.length)]
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)


def descent_of(rerun: Rerun) -> Descent:
    """The training as it was, step by step."""
    reader = Reader(rerun.function, frozenset(rerun.start), programs=ProgramCache())
    count = rerun.examples
    return Descent(
        points=Points(reader=reader, inputs=rerun.inputs, train=count, block=count, keep=False),
        targets=rerun.targets,
        loss=rerun.loss,
        scale=rerun.scale,
        optimizer=rerun.optimizer,
        factors=rerun.factors,
        schedule=rerun.schedule,
        step_size=rerun.step_size,
        steps=rerun.length,
        seed=rerun.seed,
    )
