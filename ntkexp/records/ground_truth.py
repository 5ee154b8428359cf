"""Ground truth for scores of training examples: what trainings without some of them gave.

    validation/<12 hex>.bin     the outputs of one training, by the digest of what it was
    ground_truth.npz            all trainings of one design together, for scoring other methods by them

A training is written once, sealed for its run, and whole or not at all: a validation that was killed goes on with those
that are missing, and another design takes those that it shares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import WIDTH, being_sealed, being_written, make_folder, sealed_for
from ntkexp.records.folder import RunFolder

FOLDER = "validation"
FORMAT = 1

Outputs: TypeAlias = NDArray[np.float64]
"""[point, out]"""


class TrainingWithout(NamedTuple):
    """A training without some examples, by their places, in ascending order; `seed` is that of fresh weights and
    batches, None where both are those of the run."""

    left_out: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True)
class TrainingStore:
    """The trainings beside a run, of which the outputs at these points of its axis `probe` are kept."""

    run: Path
    probe: tuple[int, ...]

    def path(self, training: TrainingWithout) -> Path:
        """The file of a training."""
        told = json.dumps([FORMAT, self.probe, training.left_out, training.seed])
        return self.run / FOLDER / f"{sha256(told.encode()).hexdigest()[:12]}.bin"

    def seal(self, training: TrainingWithout) -> str:
        return RunFolder(self.run).sealed_for(f"{FOLDER}/{self.path(training).name}")

    def write(self, training: TrainingWithout, outputs: Outputs) -> None:
        make_folder(self.run / FOLDER)
        with being_sealed(self.path(training), self.seal(training)) as file:
            file.write(npy(outputs))

    def read(self, training: TrainingWithout) -> Outputs | None:
        """The outputs, if they are there as they were written."""
        path = self.path(training)
        if not path.is_file() or not sealed_for(path, self.seal(training)):
            return None
        outputs: Outputs = np.load(BytesIO(path.read_bytes()[:-WIDTH]), allow_pickle=False)
        return outputs

    def missing(self, trainings: Sequence[TrainingWithout]) -> list[TrainingWithout]:
        """Those that are still to be done, each once."""
        return [training for training in dict.fromkeys(trainings) if self.read(training) is None]


def npy(array: NDArray[np.generic]) -> bytes:
    """An array as NumPy writes it to a file."""
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """Trainings that left some examples out, from the same start and in the same order (`fresh` = 0), or each from so
    many fresh seeds, over which outputs are averaged.

        left_out[training, example]    outputs[training, point, out]    whole[point, out], with all examples
    """

    left_out: NDArray[np.bool_]
    outputs: NDArray[np.float64]
    whole: Outputs
    examples: tuple[str, ...]
    probe: tuple[int, ...]
    identity: str
    fresh: int

    @property
    def digest(self) -> str:
        """Of who was left out and what came of it: two scores are comparable if they were compared with the same."""
        told = sha256(npy(self.left_out))
        for part in (self.outputs, self.whole):
            told.update(npy(part))
        return told.hexdigest()[:12]

    def write(self, path: Path) -> None:
        """Write it whole or not at all, as a file that NumPy opens."""
        with being_written(path) as file:
            np.savez(
                file,
                left_out=self.left_out,
                outputs=self.outputs,
                whole=self.whole,
                examples=np.array(self.examples),
                probe=np.array(self.probe, dtype=np.int64),
                facts=np.array([self.identity, str(self.fresh), self.digest]),
            )


def read_ground_truth(path: Path) -> GroundTruth:
    """Read what `GroundTruth.write` wrote; a file whose numbers are not those of its digest is refused."""
    try:
        with np.load(path, allow_pickle=False) as found:
            identity, fresh, digest = found["facts"].tolist()
            truth = GroundTruth(
                left_out=found["left_out"],
                outputs=found["outputs"],
                whole=found["whole"],
                examples=tuple(found["examples"].tolist()),
                probe=tuple(found["probe"].tolist()),
                identity=identity,
                fresh=int(fresh),
            )
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise Mistake(
            f"{path} is not a ground truth that ntkexp validate wrote ({type(error).__name__})"
        ) from None
    if truth.digest != digest:
        raise Mistake(
            f"{path} is damaged: its numbers are not those of its digest; ntkexp validate writes it again"
        )
    return truth
