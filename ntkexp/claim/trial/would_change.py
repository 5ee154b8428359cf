"""What would change if an example were left out: its effect, by a sweep back over a training recorded for it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.mean import MEANS
from ntkexp.effects.sweep import sweep_from
from ntkexp.path.backward.recorded_training import RecordedTraining
from ntkexp.path.backward.recording import Recording, row_length
from ntkexp.records.trajectory import Trajectory
from ntkexp.run.setting import Setting


def would_change(setting: Setting, *, one_step: bool = False) -> Float[Tensor, "point train"]:
    """The effects at the points that are no training examples, of a network of one output."""
    mean, problem = MEANS[setting.experiment.path.mean], setting.problem
    others = problem.inputs[problem.train :]
    with TemporaryDirectory() as folder:
        training = recorded(setting, Path(folder))

        def outputs(vector: Tensor) -> Float[Tensor, " point"]:
            return setting.points.reader.function(training.flat.weights(vector), others)[:, 0]

        sweep = sweep_from(training, jacrev(outputs)(training.end), mean, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(setting: Setting, folder: Path) -> RecordedTraining:
    """Take the steps of a training, and keep them in a folder."""
    descent, start, pull = setting.descent, setting.problem.weights, setting.domain.no_pull()
    records = setting.experiment.optimizer.differentiated
    room = setting.experiment.steps + 1, row_length(start, records, pull)
    rows = Trajectory(folder / "trajectory.bin", *room, setting.experiment.dtype)
    rows.take_room()
    recording, sizes, end = Recording(rows=rows, like=start, records=records, pull=pull), [], start
    for step in descent.walk(start):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)
