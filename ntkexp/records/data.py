"""data.npz: the examples of a run. For each split s of train, probe and test:

    <s>_shown    as a person looks at them    <s>_inputs   as the network gets them
    <s>_target   class labels, or values      <s>_targets  as the loss compares them, [example, out]
    <s>_index    which examples of the source these are
    <s>_phase    in which phase they are learned, counted from 1, where there are phases; `phases` are their names

and `classes`, their names: none for regression. `phase_classes`, [phase, class], is what each phase calls them, where
phases share the outputs.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically


def write_data(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write the arrays, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())


def read_data(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of the file; one that would run code on reading is refused."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, TypeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise Mistake(f"{path} is missing or damaged: it is no file of arrays") from error
