"""Run folders without a network: kernel descent on an RBF kernel that learns its labels as it goes.

    f_{s+1} = f_s − η K_s (f_s − y)/M,    K_s = K_0 + g_s φφᵀ,    g_s = growth·(1 − e^{−4s/T})

`secant` accumulates exactly this, `left` reads a slightly wrong kernel, and the other machines are perturbations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.data.table import read_bundled
from ntkexp.records.atomic import Json
from ntkexp.records.contributions import ContributionsByRule, write_contributions
from ntkexp.records.data import write_data
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import (
    Facts,
    create_kernels,
    finish_kernels,
    write_path_kernel,
    write_predictions,
    write_snapshot,
)
from ntkexp.records.results import MetricsWriter, Result, write_results
from ntkexp.records.sweep import Fit, Sweep, SweepRun, write_sweep as write_record

Array = NDArray[np.float64]
Counts: TypeAlias = tuple[int, int, int]  # of training, query and test examples

MISSES = {
    "secant": 0.0,
    "left": 0.12,
    "fixed_coefficients": 0.05,
    "kernel_regression": 0.02,
    "frozen_start": 0.3,
    "frozen_end": 0.2,
    "linearised": 0.31,
    "rbf_identity": 1e-15,
    "rbf_regression": 0.4,
}


@dataclass(frozen=True)
class Problem:
    """A problem: its points, targets and training."""

    shown: dict[str, Array]  # per split
    target: dict[str, NDArray[np.generic]]
    classes: tuple[str, ...] = ()
    steps: int = 60
    stable_fraction: float = 0.5
    growth: float = 0.05
    snapshots: tuple[int, ...] = ()
    seed: int = 0
    read: tuple[str, ...] = field(default=("train", "query", "test"))

    def encoded(self, split: str) -> Array:
        """Return the targets of the squared error."""
        target = self.target[split]
        if not self.classes:
            return np.asarray(target, dtype=float).reshape(len(target), -1)
        if len(self.classes) == 2:
            return 2.0 * np.asarray(target, dtype=float)[:, None] - 1.0
        return np.asarray(np.eye(len(self.classes))[np.asarray(target, dtype=int)] - 1 / len(self.classes))


def digits(
    classes: tuple[int, ...] = (3, 8), counts: tuple[int, int, int] = (40, 24, 30), **changes: object
) -> Problem:
    """Return a problem of 8×8 images of some classes."""
    images, labels = bundled()
    chosen = np.flatnonzero(np.isin(labels, classes))
    chosen = np.random.default_rng(0).permutation(chosen)[: sum(counts)]
    parts = np.split(chosen, np.cumsum(counts)[:-1])
    return Problem(
        shown={s: images[part].reshape(-1, 1, 8, 8) for s, part in zip(SPLITS, parts, strict=True)},
        target={s: np.searchsorted(classes, labels[part]) for s, part in zip(SPLITS, parts, strict=True)},
        classes=tuple(map(str, classes)),
        **changes,  # type: ignore[arg-type]  # fields of Problem, each checked where it is used
    )


@cache
def bundled() -> tuple[Array, NDArray[np.int64]]:
    """Return all images and their classes."""
    images, labels = read_bundled("digits")
    return images.numpy(), labels.numpy().astype(np.int64)


def regression(counts: Counts = (30, 20, 25), **changes: object) -> Problem:
    """Return a problem with a smooth function of two numbers."""
    rng = np.random.default_rng(1)
    shown = {s: rng.normal(size=(n, 2)) for s, n in zip(SPLITS, counts, strict=True)}
    target = {s: np.sin(2 * x[:, :1]) + x[:, 1:] for s, x in shown.items()}
    return Problem(shown=shown, target=target, **changes)  # type: ignore[arg-type]


SPLITS = ("train", "query", "test")


def write_run(path: Path, problem: Problem) -> Path:
    """Write a finished run folder."""
    folder = RunFolder(path)
    with folder.claim(), np.errstate(over="ignore", invalid="ignore"):
        folder.write_json("config.json", config(problem))
        write_data(path / "data.npz", data_arrays(problem))
        descend(path, problem)
        names = ["config.json", "data.npz", "metrics.csv", "kernels.zarr", "contributions.zarr", "predictions.zarr"]
        diverged = problem.stable_fraction > 1
        outcome = "diverged at step 3" if diverged else "finished"
        folder.finish([*names, "results.csv"], outcome=outcome, diverged=diverged)
    return path


def config(problem: Problem) -> dict[str, Json]:
    return {
        "_target_": "ntkexp.experiment.Experiment",
        "data": {"_target_": "ntkexp.data.Digits", "train": len(problem.shown["train"])},
        "model": {"_target_": "ntkexp.model.MLP", "width": 512},
        "path": {"_target_": "ntkexp.path.Path", "queries": list(problem.read)},
        "steps": problem.steps,
        "seed": problem.seed,
    }


def data_arrays(problem: Problem) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {"classes": np.array(problem.classes, dtype=np.str_)}
    start = 0
    for split in SPLITS:
        shown = problem.shown[split]
        arrays |= {f"{split}_shown": shown, f"{split}_inputs": shown, f"{split}_target": problem.target[split]}
        arrays |= {f"{split}_targets": problem.encoded(split), f"{split}_index": np.arange(start, start + len(shown))}
        start += len(shown)
    return arrays


def landscape(problem: Problem) -> tuple[Array, Array, Array]:
    """Return K_0 and φφᵀ between all points and the training examples, and all targets."""
    flat = [problem.shown[split].reshape(len(problem.shown[split]), pixels(problem)) for split in SPLITS]
    inputs, y, M = np.concatenate(flat), np.concatenate([problem.encoded(split) for split in SPLITS]), len(flat[0])
    squares = ((inputs[:, None] - inputs[None, :M]) ** 2).sum(2)
    base = np.exp(-squares / np.median(squares))
    learned = base @ y[:M] / M
    learned /= np.abs(learned).max()
    return base, (learned @ learned[:M].T) * M / 8, y


def pixels(problem: Problem) -> int:
    return int(np.prod(problem.shown["train"].shape[1:]))


def kept(problem: Problem) -> NDArray[np.int64]:
    """Return the indices of the read points."""
    ends = np.cumsum([0, *(len(problem.shown[split]) for split in SPLITS)])
    return np.concatenate([np.arange(ends[k], ends[k + 1]) for k, s in enumerate(SPLITS) if s in problem.read])


def descend(path: Path, problem: Problem) -> None:
    """Train, and write every store and table."""
    rng, kernels, points = np.random.default_rng(problem.seed), path / "kernels.zarr", kept(problem)
    base, feature, y = landscape(problem)
    M, C, T = base.shape[1], y.shape[1], problem.steps
    K_0, identity = expand(base, np.eye(C)), np.eye(C)
    eta = problem.stable_fraction * 2 * M / np.linalg.eigvalsh(base[:M]).max()
    f = f_0 = 0.1 * rng.normal(size=y.shape)
    schedule = problem.snapshots or tuple(sorted({0, T, *(round(T ** (k / 8)) for k in range(9))}))
    create_kernels(kernels, len(points), C, M, len(schedule))
    path_kernel, sums = np.zeros_like(base), {rule: np.zeros((len(y), C, M)) for rule in ("secant", "left")}
    with MetricsWriter(path / "metrics.csv", COLUMNS) as metrics:
        for s in range(T + 1):
            K = base + problem.growth * (1 - np.exp(-4 * s / T)) * feature
            row = measure(problem, s, eta, f, y)
            if s in schedule:
                full = expand(K, identity) if np.isfinite(f).all() else np.full_like(K_0, np.nan)
                write_snapshot(kernels, schedule.index(s), s, full[points], f[:M] - y[:M])
                row |= spectrum(full, K_0, M * C, eta / M) if np.isfinite(f).all() else {}
            if s < T:
                change = -eta * np.einsum("qm,mc->qcm", K, (f[:M] - y[:M]) / M)
                row |= masses(change) | {"kernel_mass": eta * float(np.linalg.norm(K))}
                path_kernel += eta * K
                sums["secant"] += change
                sums["left"] += change * (1 + 0.1 * rng.normal(size=(1, 1, M)))
                f = f + change.sum(2)
            metrics.write(row)
    finish_kernels(kernels)
    for rule in sums:
        whole = expand(path_kernel, identity)[points]
        write_path_kernel(kernels, rule, whole, range(len(whole)), range(C))
    parts = {rule: values[points] for rule, values in sums.items()}
    known: dict[str, Facts] = {"secant": {"error_bar": 2e-3, "cancellation": 21.0}}
    said = {rule: ContributionsByRule(values, facts=known.get(rule, {})) for rule, values in parts.items()}
    write_contributions(path / "contributions.zarr", said, list(range(M)), range(C))
    machines = reconstructions(f_0[points], f[points], parts, rng)
    write_predictions(path / "predictions.zarr", {"f_0": f_0[points], "f_T": f[points], **machines})
    write_results(path / "results.csv", compare(problem, f_0[points], f[points], machines))


def masses(change: Array) -> dict[str, float | int | None]:
    parts, net = float(np.abs(change).sum()), float(np.abs(change.sum(2)).sum())
    return {"contribution_mass": parts, "contribution_sum": net, "closure": 1e-16}


def expand(kernel: Array, outputs: Array) -> Array:
    """Combine [query, train] and [out, out_] to [query, out, train, out_]."""
    return np.asarray(np.einsum("qm,cd->qcmd", kernel, outputs))


def measure(problem: Problem, s: int, eta: float, f: Array, y: Array) -> dict[str, float | int | None]:
    M = len(problem.shown["train"])
    loss = ((f - y) ** 2).sum(1) / 2
    held = loss[M:].mean() if len(loss) > M else None
    right = (np.sign(f) == np.sign(y)).all(1) if f.shape[1] == 1 else f.argmax(1) == y.argmax(1)
    return {
        "step": s,
        "time": s * eta,
        "step_size": eta,
        "loss": float(loss[:M].mean()),
        "loss_query": held,
        "accuracy": float(right[:M].mean()) if problem.classes else None,
        "weights_moved": 0.02 * (1 - np.exp(-4 * s / problem.steps)),
    }


def spectrum(kernel: Array, start: Array, size: int, weighted_step: float) -> dict[str, float]:
    M = kernel.shape[2]
    values = np.linalg.eigvalsh(kernel[:M].reshape(size, size))[::-1]
    kernel_change = float(np.linalg.norm(kernel - start) / np.linalg.norm(start))
    row = {"kernel_change": kernel_change, "lambda_max": values[0], "stability": weighted_step * values[0] / 2}
    return row | {f"eigenvalue_{k + 1}": float(values[k]) for k in range(min(10, size))}


def reconstructions(f_0: Array, f_T: Array, sums: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    scale = np.linalg.norm(f_T - f_0) / np.sqrt(f_T.size)
    machines = {name: f_T + miss * scale * rng.normal(size=f_T.shape) for name, miss in MISSES.items()}
    return machines | {rule: f_0 + values.sum(2) for rule, values in sums.items()}


def compare(problem: Problem, f_0: Array, f_T: Array, machines: dict[str, Array]) -> list[Result]:
    rows, start = [], 0
    for split in problem.read:
        part = slice(start, start := start + len(problem.shown[split]))
        if part.stop == part.start:
            continue
        moved = float(np.linalg.norm(f_T[part] - f_0[part]))
        for name, f in machines.items():
            miss = f[part] - f_T[part]
            rows.append(
                Result(
                    split,
                    name,
                    "substeps=1" if name == "secant" else "",
                    float(np.linalg.norm(miss)) / moved,
                    2e-13,
                    float(np.abs(miss).max()),
                    float((np.sign(f[part]) == np.sign(f_T[part])).mean()) if problem.classes else None,
                    float(1 - (miss**2).sum() / ((f_T[part] - f_T[part].mean()) ** 2).sum()),
                    control=name.startswith("rbf"),
                )
            )
        rows.append(Result(split, "nngp", note="infinite width is not known for this model"))
    return rows


COLUMNS = (
    *("step", "time", "step_size", "loss", "accuracy", "loss_query", "accuracy_query", "weights_moved", "closure"),
    *("contribution_mass", "contribution_sum", "kernel_mass", "kernel_change", "lambda_max", "stability"),
    *(f"eigenvalue_{k}" for k in range(1, 11)),
)


# Sweeps without networks: run folders whose kernel change follows a law, and the record of the sweep.


WIDTHS: tuple[int, ...] = (32, 64, 128, 256)


def law(width: int, seed: int, exponent: float = -0.5) -> float:
    """Return the kernel change of a run: a power of the width with a scatter of a few per cent."""
    rng = np.random.default_rng([width, seed])
    return float(width**exponent * np.exp(0.03 * rng.normal()))


def write_small_run(path: Path, width: int, seed: int, kernel_change: float, activation: str = "relu") -> Path:
    """Write a finished run that has only tables."""
    folder = RunFolder(path)
    with folder.claim():
        model: dict[str, Json] = {"_target_": "ntkexp.model.MLP", "width": width, "activation": activation}
        folder.write_json("config.json", {"model": model, "seed": seed})
        folder.write("overrides.txt", f"model.width={width}\nseed={seed}\n")
        with MetricsWriter(path / "metrics.csv", ("step", "loss", "kernel_change")) as metrics:
            for step in range(11):
                metrics.write({"step": step, "loss": 0.5 * 0.8**step, "kernel_change": kernel_change * step / 10})
        errors = {"secant": 4e-15, "left": 0.003, "frozen_start": 2 * kernel_change}
        rows = [
            Result(split, machine, "", error, 2e-13, error, 1.0, 1.0)
            for split, (machine, error) in product(("train", "query", "test"), errors.items())
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
    """Write a sweep over widths and other axes. The failed runs, given by their index, have no folder."""
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
        Fit(quantity="kernel_change", axis="model.width", exponent=-0.5),
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
