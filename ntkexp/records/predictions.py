"""predictions.zarr: what the network and every kernel machine say at every point.

    prediction  [machine, probe, out]   the machines' names are the attribute `machines`

`f_0` and `f_T` are the network before and after training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.store import create_store, get_array, open_store, put_array


def write_predictions(path: Path, predictions: Mapping[str, NDArray[np.float64]]) -> None:
    """Write each machine's outputs [probe, out], in the order given."""
    stacked = np.stack([np.asarray(values, dtype=np.float64) for values in predictions.values()])
    store = create_store(path, {"machines": list(predictions)})
    put_array(store, "prediction", stacked, ("machine", "probe", "out"), {})


def read_predictions(path: Path) -> dict[str, NDArray[np.float64]]:
    """Read each machine's outputs [probe, out], in the order written."""
    store = open_store(path)
    names = store.attrs["machines"]
    assert isinstance(names, list)
    return dict(zip(map(str, names), np.asarray(get_array(store, "prediction")[...]), strict=True))
