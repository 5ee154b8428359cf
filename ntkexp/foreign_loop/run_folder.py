"""Write the attribution of a trace as a run folder. `ntkexp report` and all other
readers of runs can then read it. The queries are the split `query` of the run.

metrics.csv    a row for each step with the errors of its proofs: the gradient (a), with its factor
               c, the update rule (b), and the secant (c)
results.csv    one row, for the kernel machine `secant`: the distance between f_0 + Σ contributions +
               decay and f_T
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ntkexp.foreign_loop.batch_norm import batch_norm_sentence
from ntkexp.foreign_loop.closing import casts_sentence, rounding_sentence
from ntkexp.foreign_loop.equal_inputs import equal_inputs_sentence
from ntkexp.foreign_loop.gallery import Decode, Gallery, shown, texts, words_of_tokens
from ntkexp.foreign_loop.outside import outside_sentence
from ntkexp.foreign_loop.store.files import START, TraceFolder
from ntkexp.records.atomic import WIDTH, Sealing
from ntkexp.records.contributions import (
    BY_COMPONENT,
    BY_COMPONENT_STEP,
    BY_POSITION,
    COMPONENT,
    COUPLING,
    DECAY_BY_COMPONENT,
    JUMPED,
    JUMPS,
    MEASURE,
    OUTSIDE,
    ROUNDING,
    STATISTICS,
    STORE,
    ByComponent,
    ByStep,
    ContributionsByRule,
    LeaveOut,
    add_effect,
    write_contributions,
    write_leave_out,
)
from ntkexp.records.data import OUT_NAME, write_data
from ntkexp.records.folder import (
    BEGUN,
    CONFIG,
    PROVENANCE,
    RESULTS,
    RunFolder,
    command,
    package_version,
    results_version,
)
from ntkexp.records.kernels import (
    KERNELS,
    create_kernels,
    finish_kernels,
    write_predictions,
)
from ntkexp.records.own_files import remove_store
from ntkexp.records.results import (
    FOLLOWED,
    MetricsWriter,
    Result,
    rounding_floor,
    write_results,
)
from ntkexp.report.drawing import draw_run
from ntkexp.shapes import Inputs
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

CONTRIBUTIONS = "contributions.zarr"
PROOFS = ("gradient_factor", "gradient_error", "rule_error", "closure")
CASTS = "casts_error"  # rounding error of the gradient under casts


def write_run(
    folder: RunFolder,
    attribution: xr.Dataset,
    queries: Inputs,
    gallery: Gallery,
    decode: Decode | None,
    check: LeaveOut | None,
) -> None:
    """Write the results, and mark the folder as finished."""
    path = folder.path
    with folder.claim():
        folder.reopen()
        write_data(path / "data.npz", examples(attribution, queries, gallery, decode))
        write_metrics(folder, attribution)
        write_outputs(folder, attribution)
        write_parts(folder, attribution)
        remove_store(path / STORE)
        if check is not None:
            write_leave_out(path / STORE, check)

        # the state of the run, its pictures, and the identity of the results
        files = TraceFolder(folder)
        identity = identity_of(files)
        folder.begin(RESULTS, identity)
        folder.write_sealed(PROVENANCE, provenance(folder))
        steps = attribution.sizes["step"]
        outcome = outcome_sentence(attribution, files)
        folder.write_sealed(
            "progress.json", {"step": steps, "steps": steps, "outcome": outcome}
        )
        pictures = folder.write_pictures(draw_run(path))
        checked = [] if check is None else [STORE]
        folder.finish(
            [*RESULTS, *checked, *pictures],
            PROVENANCE,
            identity=identity,
            outcome=outcome,
            diverged=False,
            steps=steps,
        )
        (path / BEGUN).unlink()


# --- Arrays and tables.


def examples(
    attribution: xr.Dataset, queries: Inputs, gallery: Gallery, decode: Decode | None
) -> Mapping[str, NDArray[np.generic]]:
    """Return the arrays of examples and queries for data.npz."""
    names = [str(name) for name in attribution["example"].to_numpy()]
    query_names = [f"query {index}" for index in range(attribution.sizes["query"])]
    rows = gallery.of(names)
    arrays: dict[str, NDArray[Any]] = {"classes": np.array([], dtype=str)}
    if MEASURE in attribution.attrs and attribution["out"].dtype.kind == "U":
        arrays[OUT_NAME] = attribution["out"].to_numpy()
    arrays |= split_arrays("train", names, rows, decode)
    words = words_of_tokens(attribution, rows, decode)
    if words is not None:
        arrays["train_tokens"] = words
    arrays |= split_arrays("query", query_names, shown(queries), decode)
    return arrays


def split_arrays(
    split: str, names: list[str], rows: NDArray[Any], decode: Decode | None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of one split, to be written to data.npz."""
    arrays: dict[str, NDArray[Any]] = {
        f"{split}_index": np.arange(len(names)),
        f"{split}_name": np.array(names, dtype=str),
        f"{split}_shown": rows,
    }
    if decode is not None:
        arrays[f"{split}_text"] = texts(rows, decode)
    return arrays


def write_metrics(folder: RunFolder, attribution: xr.Dataset) -> None:
    """Write metrics.csv, which has a row for each step."""
    change = np.linalg.norm(attribution["by_step"].to_numpy(), axis=(0, 1))
    proofs = [name for name in (*PROOFS, CASTS) if name in attribution]
    with MetricsWriter(
        folder.path / "metrics.csv", ("step", *proofs, "change")
    ) as metrics:
        for step in range(attribution.sizes["step"]):
            row = {name: float(attribution[name][step]) for name in proofs}
            metrics.write({"step": step, **row, "change": float(change[step])})


def write_outputs(folder: RunFolder, attribution: xr.Dataset) -> None:
    """Write the outputs f_0 and f_T at the queries, and the distance between f_T and
    f_0 + Σ contributions + decay."""
    start = attribution["start"].to_numpy()
    end = start + attribution["change"].to_numpy()
    total = attribution["contribution"].to_numpy().sum(2)
    explained = start + total + attribution["decay"].to_numpy()
    rounding = float(np.linalg.norm(attribution["rounding"].to_numpy()))
    result = secant_result(
        start, end, explained, rounding, no_examples_sentence(attribution)
    )
    write_results(folder.path / "results.csv", [result])
    predictions = {"f_0": start, "f_T": end, "secant": explained}
    write_predictions(folder.path / "predictions.zarr", predictions)
    points, outputs = start.shape
    train = attribution.sizes["example"]
    create_kernels(folder.path / KERNELS, points, outputs, train, capacity=0)
    finish_kernels(folder.path / KERNELS)


def secant_result(
    start: NDArray[Any],
    end: NDArray[Any],
    explained: NDArray[Any],
    rounding: float,
    outside: str,
) -> Result:
    """Return the row of the kernel machine `secant` in results.csv.

    Args:
        start: outputs f_0.
        end: outputs f_T.
        explained: f_0 + Σ contributions + decay. Casts, rounding and changes outside
            the steps are not included.
        rounding: norm of the effect of rounding.
        outside: note on changes that no example made.
    """
    change = float(np.linalg.norm(end - start))
    error = float(np.linalg.norm(explained - end))
    size = float(np.linalg.norm(start) + np.linalg.norm(end))
    spread = float(np.square(end - end.mean(0)).sum())
    return Result(
        split="query",
        machine="secant",
        detail=FOLLOWED,
        relative_error=error / change if change else None,
        floor=rounding_floor(size, change, float(np.finfo(end.dtype).eps), rounding),
        max_error=float(np.abs(explained - end).max()),
        r2=1 - error**2 / spread if spread else None,
        note=outside if change else "the network did not move here",
    )


def write_parts(folder: RunFolder, attribution: xr.Dataset) -> None:
    """Write contributions, all other parts of the change, and leave-out effects."""

    def optional(name: str) -> NDArray[Any] | None:
        return attribution[name].to_numpy() if name in attribution else None

    rounds = rounding_sentence(attribution) or casts_sentence(attribution)
    decay = attribution["decay"].to_numpy()
    steps = range(attribution.sizes["step"] + 1)
    secant = ContributionsByRule(
        parts=attribution["contribution"].to_numpy(),
        decay=decay if decay.any() else None,
        outside=optional(OUTSIDE),
        statistics=optional(STATISTICS),
        jumps=optional(JUMPS),
        coupling=optional(COUPLING),
        rounding=attribution[ROUNDING].to_numpy() if rounds else None,
        by_step=ByStep(attribution["by_step"].to_numpy(), steps),
        half_by=optional("half_by"),
        by_component=shares_of_components(attribution),
        by_position=optional(BY_POSITION),
    )
    names = attribution["example"].to_numpy().tolist()
    outs = range(attribution.sizes["out"])
    write_contributions(folder.path / CONTRIBUTIONS, {"secant": secant}, names, outs)
    if "effect" in attribution:
        effect = attribution["effect"]
        add_effect(folder.path / CONTRIBUTIONS, effect.to_numpy(), effect.attrs)


def shares_of_components(attribution: xr.Dataset) -> ByComponent | None:
    """Return the contributions by component, or None if the user
    did not ask for components."""
    if BY_COMPONENT not in attribution:
        return None
    names = (BY_COMPONENT, DECAY_BY_COMPONENT, BY_COMPONENT_STEP)
    arrays = (attribution[name].to_numpy() for name in names)
    return ByComponent(attribution[COMPONENT].to_numpy().tolist(), *arrays)


# --- Facts.


def identity_of(files: TraceFolder) -> str:
    """Return a digest of config.json, start.bin and steps.log."""
    sealing = Sealing("trace")
    sealing.update((files.folder.path / CONFIG).read_bytes())
    for file in (files.path / START, files.shard / "steps.log"):
        with file.open("rb") as stream:
            stream.seek(-WIDTH, os.SEEK_END)
            # every file ends with a digest of its content, which identifies the file
            sealing.update(stream.read())
    return sealing.digest.hex()


def no_examples_sentence(attribution: xr.Dataset) -> str:
    """Return sentences on changes that no example made, or an empty string."""
    sentences = (
        batch_norm_sentence(attribution),
        str(attribution.attrs.get(JUMPED, "")),
        outside_sentence(attribution),
    )
    return "; ".join(filter(None, sentences))


def outcome_sentence(attribution: xr.Dataset, files: TraceFolder) -> str:
    """Return sentences on the proofs of the steps, and on all caveats."""
    caveats = [
        ""
        if files.ended.exists()
        else "the loop was interrupted after these steps, or still runs",
        casts_sentence(attribution),
        rounding_sentence(attribution),
        no_examples_sentence(attribution),
        equal_inputs_sentence(attribution),
    ]
    if "effect" in attribution:
        caveats.append(attribution["effect"].attrs["caveats"])
    gradient, rule, closure = (
        short(float(attribution[name].max())) for name in PROOFS[1:]
    )
    processes = f" in {files.processes} processes" if files.processes > 1 else ""
    proved = (
        f"{attribution.sizes['step']} steps of a loop{processes} were followed; the "
        f"largest relative errors are {gradient} of a gradient, {rule} of a step of the "
        f"optimizer, and {closure} of a secant"
    )
    return "; ".join([proved, *filter(None, caveats)])


def provenance(folder: RunFolder) -> dict[str, Any]:
    """Return the command that wrote the results, the versions, and the machine."""
    return {
        "command": command("attribute", [str(folder.path)]),
        "folder": os.getcwd(),
        "ntkexp": package_version(),
        "results_version": results_version,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }
