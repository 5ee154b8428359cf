"""What would change if an example were left out: its effect, by a sweep back over a training recorded for it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.trial.retraining import Retraining
from ntkexp.effects.mean import MEANS
from ntkexp.effects.sweep import sweep_from
from ntkexp.path.backward.recorded_training import RecordedTraining
from ntkexp.path.backward.recording import Recording, row_length
from ntkexp.records.trajectory import Trajectory


def would_change(found: Retraining, *, one_step: bool = False) -> Float[Tensor, "point train"]:
    """The effects at the points that are no training examples."""

    def outputs(vector: Tensor) -> Float[Tensor, " point"]:
        return found.rerun.outputs(vector, found.others)[:, 0]

    mean = MEANS[found.setting.experiment.path.mean]
    with TemporaryDirectory() as folder:
        training = recorded(found, Path(folder))
        sweep = sweep_from(training, jacrev(outputs)(training.end), mean, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(found: Retraining, folder: Path) -> RecordedTraining:
    """Take the steps of a training once more, and keep them in a folder."""
    setting, steps, optimizer = found.setting, found.outcome.steps, found.setting.experiment.optimizer
    descent, start, pull = setting.descent, setting.problem.weights, setting.domain.no_pull()
    records = (*optimizer.records, *optimizer.differentiated)
    room = steps + 1, row_length(start, records, pull)
    rows = Trajectory(folder / "trajectory.bin", *room, setting.experiment.dtype)
    rows.take_room()
    recording, sizes, end = Recording(rows=rows, like=start, records=records, pull=pull), [], start
    for step in islice(descent.walk(start), steps):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)
