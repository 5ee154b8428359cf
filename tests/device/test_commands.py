"""Commands on the device: a training that is killed and repeated, a sweep, kernels in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xarray as xr
from xarray import Dataset

from tests.device.emulated import DEVICE, autoloading
from tests.run.commands import TINY, only_run, promised

pytestmark = pytest.mark.slow
HERE = f"device={DEVICE}"
CLOSE = 1e-9  # of all entries, in float64


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Begin a command that prints nothing."""
    environment = os.environ | autoloading(folder / "site" / str(len(list(folder.glob("site/*")))))
    command = [sys.executable, "-m", "ntkexp", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def done(folder: Path, *words: str) -> None:
    """Carry out a command."""
    process = begun(folder, *words)
    _, said = process.communicate()
    assert process.returncode == 0, said


def missed(found: Dataset, expected: Dataset) -> float:
    """Return the largest difference of any array of numbers, relative to the largest number of that array."""
    assert found.keys() == expected.keys()
    errors = [0.0]
    for name, values in expected.items():
        if values.dtype.kind == "f" and values.size and (size := float(abs(values).max())):
            errors.append(float(abs(found[name] - values).max()) / size)
    return max(errors)


BITS = ("contributions.zarr", "kernels.zarr", "predictions.zarr", "results.csv")


def test_a_training_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    words = ("train", "--quiet", *TINY, "steps=200", HERE)
    done(tmp_path, *words, "--out=whole")
    process = begun(tmp_path, *words, "--out=killed")
    while process.poll() is None and not list((tmp_path / "killed").glob("runs/*/checkpoint.pt")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done(tmp_path, *words, "--out=killed")
    whole, killed = (promised(only_run(tmp_path / name)) for name in ("whole", "killed"))
    assert {name.partition("/")[0] for name in whole}.issuperset(BITS)
    for name in whole:
        assert not name.startswith(BITS) or whole[name] == killed[name], name


def test_a_sweep_trains_on_the_device(tmp_path: Path) -> None:
    done(tmp_path, "sweep", "--quiet", "seed=0,1", *TINY, HERE, "--workers=2", "--out=out")
    assert len(list((tmp_path / "out" / "runs").glob("*/DONE.json"))) == 2


def test_kernels_in_a_file_are_those_of_the_processor(tmp_path: Path) -> None:
    stores = []
    for name, words in (("cpu", ()), ("device", (HERE,))):
        done(tmp_path, "kernel", "tangent", "--quiet", *TINY[:4], f"--out={name}.zarr", *words)
        with xr.open_zarr(tmp_path / f"{name}.zarr", consolidated=False) as store:
            stores.append(store.load())
    expected, found = stores
    assert missed(found, expected) <= CLOSE
