"""Sweeps without networks: run folders that hold a law in place of training, and the file that tells of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from ntkexp.records.atomic import Json
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import MetricsWriter, Result, write_results
from ntkexp.records.sweep import Fit, Sweep, SweepRun
from ntkexp.records.sweep import write_sweep as write_record

WIDTHS: tuple[int, ...] = (32, 64, 128, 256)


def law(width: int, seed: int, exponent: float = -0.5) -> float:
    """Drift of a run: a power of the width with scatter of a few per cent."""
    rng = np.random.default_rng([width, seed])
    return float(width**exponent * np.exp(0.03 * rng.normal()))


def write_small_run(path: Path, width: int, seed: int, drift: float, activation: str = "relu") -> Path:
    """The tables of a finished run, and nothing else."""
    folder = RunFolder(path)
    with folder.claim():
        model: dict[str, Json] = {"_target_": "ntkexp.model.MLP", "width": width, "activation": activation}
        folder.write_json("config.json", {"model": model, "seed": seed})
        folder.write("overrides.txt", f"model.width={width}\nseed={seed}\n")
        with MetricsWriter(path / "metrics.csv", ("step", "loss", "drift")) as metrics:
            for step in range(11):
                metrics.write({"step": step, "loss": 0.5 * 0.8**step, "drift": drift * step / 10})
        errors = {"secant": 4e-15, "left": 0.003, "frozen_start": 2 * drift}
        rows = [
            Result(split, machine, "", error, 2e-13, error, 1.0, 1.0)
            for split, (machine, error) in product(("train", "probe", "test"), errors.items())
        ]
        write_results(path / "results.csv", rows)
        folder.finish(["config.json", "metrics.csv", "results.csv"], outcome="trained for 10 steps", diverged=False)
    return path


def write_sweep(
    outputs: Path,
    name: str = "width",
    axes: Mapping[str, Sequence[int | str]] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    exponent: float = -0.5,
    factor: float = 1.0,
    failed: Sequence[int] = (),
) -> Path:
    """A sweep over widths and what else there is; runs by their place in it that failed have no folder."""
    axes = axes or {"model.width": WIDTHS}
    runs = []
    places = [(point, seed) for point in product(*axes.values()) for seed in seeds]
    for k, (point, seed) in enumerate(places):
        levels = dict(zip(axes, point, strict=True))
        width, kind = int(levels.get("model.width", 64)), str(levels.get("model.activation", "relu"))
        folder = outputs / "runs" / f"mlp-w{width}-s{seed}-{name}{k:04d}"
        if k not in failed:
            write_small_run(folder, width, seed, factor * law(width, seed, exponent), kind)
        state, reason = ("failed", "model.width is too large") if k in failed else ("done", "")
        runs.append(SweepRun(folder=folder, axes=levels, seed=seed, state=state, reason=reason))
    fits = (
        Fit(quantity="drift", axis="model.width", exponent=-0.5),
        Fit(quantity="frozen_start.test", axis="model.width"),
    )
    sweep = Sweep(
        path=outputs / "sweeps" / f"{name}.json",
        name=name,
        command=f"ntkexp sweep {name}",
        axes={key: tuple(values) for key, values in axes.items()},
        seeds=tuple(seeds),
        base=(),
        fits=fits,
        runs=tuple(runs),
    )
    write_record(sweep)
    return sweep.path
