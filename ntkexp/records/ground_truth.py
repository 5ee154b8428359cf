"""Ground truth for scores of training examples:
the outputs after retraining without some examples.

    validation/<12 hex>.bin     the outputs after one retraining; its name is a digest of the
                                left-out examples, the queries and the seed
    ground_truth.npz            all retrainings of one design (a list of subsets of examples)

The file ground_truth.npz serves to judge the scores of other methods.

Each file is written atomically. A .bin file ends with a seal, a digest of its content
and of the run's identity. A validation that was killed continues with the missing
retrainings. A retraining that is part of several designs is stored once."""

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

from ntkexp.records.atomic import being_sealed, being_written, make_folder, sealed_for
from ntkexp.records.folder import RunFolder

VALIDATION_FOLDER = "validation"
FORMAT = 1

Outputs: TypeAlias = NDArray[np.float64]
"""[point, out]"""


class TrainingWithout(NamedTuple):
    """A retraining without some examples. `left_out` are the indices of these examples,
    in ascending order.

    `seed` determines the initial weights and the batches. None means the weights and
    batches of the run."""

    left_out: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True)
class TrainingStore:
    """The stored outputs after retrainings of a run, at some queries. `query` are the
    indices of these queries on the axis `query` of the run."""

    run: Path
    query: tuple[int, ...]

    def path(self, training: TrainingWithout) -> Path:
        """Return the path of the file of a retraining."""
        key = json.dumps([FORMAT, self.query, training.left_out, training.seed])
        return (
            self.run
            / VALIDATION_FOLDER
            / f"{sha256(key.encode()).hexdigest()[:12]}.bin"
        )

    def seal(self, training: TrainingWithout) -> str:
        return RunFolder(self.run).sealed_for(
            f"{VALIDATION_FOLDER}/{self.path(training).name}"
        )

    def write(self, training: TrainingWithout, outputs: Outputs) -> None:
        make_folder(self.run / VALIDATION_FOLDER)
        with being_sealed(self.path(training), self.seal(training)) as file:
            file.write(npy(outputs))

    def read(self, training: TrainingWithout) -> Outputs | None:
        """Return the outputs after a retraining,
        or None if they are missing or damaged."""
        path = self.path(training)
        if not path.is_file() or not sealed_for(path, self.seal(training)):
            return None
        # `np.load` ignores the digest after the array
        outputs: Outputs = np.load(path, allow_pickle=False)
        return outputs

    def missing(self, trainings: Sequence[TrainingWithout]) -> list[TrainingWithout]:
        """Return the retrainings whose outputs are not stored, each once."""
        return [
            training
            for training in dict.fromkeys(trainings)
            if self.read(training) is None
        ]


def npy(array: NDArray[np.generic]) -> bytes:
    """Return an array in NumPy's file format."""
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The outputs after retraining without some examples,
    for several subsets of examples.

    If `fresh` is 0, all retrainings use the initial weights and the batches of the run.
    Otherwise the outputs are means over `fresh` new seeds."""

    left_out: NDArray[np.bool_]  # [training, example]
    outputs: NDArray[np.float64]  # [training, point, out]
    whole: Outputs  # [point, out], after training with all examples
    examples: tuple[str, ...]
    query: tuple[int, ...]
    identity: str
    fresh: int

    @property
    def digest(self) -> str:
        """A digest of the subsets and the outputs.

        Scores of two methods are comparable if they refer to ground truths
        with equal digests."""
        digest = sha256(npy(self.left_out))
        for part in (self.outputs, self.whole):
            digest.update(npy(part))
        return digest.hexdigest()[:12]

    def write(self, path: Path) -> None:
        with being_written(path) as file:
            np.savez(
                file,
                left_out=self.left_out,
                outputs=self.outputs,
                whole=self.whole,
                examples=np.array(self.examples),
                query=np.array(self.query, dtype=np.int64),
                facts=np.array([self.identity, str(self.fresh), self.digest]),
            )
