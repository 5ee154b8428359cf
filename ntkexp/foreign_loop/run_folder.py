"""What was found of a trace becomes a run folder, which all that reads runs can read: the queries are its probes.

metrics.csv    a row per step and its proofs: factor and error of the gradient (a), error of the rule (b), closure (c)
results.csv    how f_0 + Σ contributions + decay meets f_T at the queries: the machine `secant`
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ntkexp.foreign_loop.batch_norm import batch_norm_sentence
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.closing import casts_sentence, rounding_sentence
from ntkexp.foreign_loop.equal_inputs import RepeatedInputs, equal_inputs_sentence
from ntkexp.foreign_loop.outside import outside_sentence
from ntkexp.foreign_loop.store.files import START, TraceFolder
from ntkexp.kernel.record.tape import tensors
from ntkexp.records.atomic import WIDTH, Sealing
from ntkexp.records.contributions import (
    BY_COMPONENT,
    BY_COMPONENT_STEP,
    BY_POSITION,
    COMPONENT,
    COUPLING,
    DECAY_BY_COMPONENT,
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
    RunFolder,
    command,
    package_version,
    results_version,
)
from ntkexp.records.kernels import KERNELS, create_kernels, finish_kernels, write_predictions
from ntkexp.records.own_files import remove_store
from ntkexp.records.results import FOLLOWED, MetricsWriter, Result, rounding_floor, write_results
from ntkexp.report.drawing import draw_run
from ntkexp.report.examples import Example, named_example
from ntkexp.report.top_examples import top_examples_of
from ntkexp.shapes import Inputs
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr


# --- Examples as a person looks at them: the tensor of a call that holds most of each, and its text if it is of
# tokens.


Decode: TypeAlias = Callable[[Sequence[int]], str]
"""From the numbers of tokens to their text."""

MOST = 500e6  # bytes of examples that are kept once more, to be looked at
PREFERRED = (
    "input_ids",
    "pixel_values",
)  # what models of Hugging Face call what a person would look at


@dataclass
class Gallery:
    """Rows of the examples that were seen so far, by their names; of none, once they take too much."""

    rows: dict[str, NDArray[Any]] = field(default_factory=dict)
    room: float = MOST
    repeated: RepeatedInputs = field(default_factory=RepeatedInputs)

    def add(self, call: ModelCall) -> None:
        """Add the examples of a call that are new."""
        self.repeated.add(call)
        rows = shown(call.inputs)
        for name, row in zip(call.names, rows, strict=True):
            if name not in self.rows and self.room > 0:
                self.rows[name] = row
                self.room -= row.nbytes

    def of(self, names: Sequence[str]) -> NDArray[Any]:
        """The rows of some examples; empty ones, if there was no room for all."""
        found = [self.rows[name] for name in names if name in self.rows]
        return (
            stacked(found)
            if len(found) == len(names) and self.room > 0
            else np.zeros((len(names), 0))
        )


def shown(inputs: Inputs) -> NDArray[Any]:
    """What a person would look at, a row for each example.

    >>> shown({"mask": torch.ones(1, 2), "input_ids": torch.tensor([[4, 7]])})
    array([[4, 7]])
    """
    named = inputs if isinstance(inputs, Mapping) else {}
    found = next(
        (named[key] for key in PREFERRED if isinstance(named.get(key), Tensor)), tensors(inputs)[0]
    )
    assert isinstance(found, Tensor)
    number = found.detach().cpu()
    return np.asarray((number.double() if number.dtype == torch.bfloat16 else number).numpy())


def stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows as one array; sentences of several lengths are filled up with −1.

    >>> stacked([np.array([5, 6]), np.array([7])])
    array([[ 5,  6],
           [ 7, -1]])
    """
    if len({row.shape for row in rows}) == 1:
        return np.stack(rows)
    if any(row.ndim != 1 for row in rows):
        return np.zeros((len(rows), 0))
    longest = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, longest - len(row)), constant_values=-1) for row in rows])


def texts(rows: NDArray[Any], decode: Decode) -> NDArray[np.str_]:
    """The text of rows of tokens."""
    return np.array(
        [decode([int(token) for token in row if token >= 0]) for row in rows], dtype=str
    )


def token_texts(rows: NDArray[Any], decode: Decode) -> NDArray[np.str_]:
    """The text of each token by itself; none of what fills up.

    >>> token_texts(np.array([[1, 0], [1, -1]]), lambda tokens: "".join("ab"[k] for k in tokens)).tolist()
    [['b', 'a'], ['b', '']]
    """
    known = {int(token): decode([int(token)]) for token in np.unique(rows) if token >= 0}
    return np.array([[known.get(int(token), "") for token in row] for row in rows], dtype=str)


@dataclass(frozen=True)
class ShownExamples:
    """Those queries and examples that a notebook shows, by axis and place."""

    known: Mapping[tuple[str, int], Example]

    @classmethod
    def of(
        cls, found: xr.Dataset, queries: Inputs, gallery: Gallery, decode: Decode | None
    ) -> ShownExamples:
        """Keep the first queries, and the examples that did most to them."""

        def named(place: int, name: str, row: NDArray[Any]) -> Example:
            return named_example(
                place,
                name,
                row.copy(),
                None if decode is None else str(texts(row[None], decode)[0]),
            )

        known, points, names = (
            dict[tuple[str, int], Example](),
            shown(queries),
            found["example"].to_numpy().tolist(),
        )
        for top in top_examples_of(found):
            known["probe", top.point] = named(top.point, f"query {top.point}", points[top.point])
            for place in top.places:
                if names[place] in gallery.rows:
                    known["example", place] = named(place, names[place], gallery.rows[names[place]])
        return cls(known)

    def __call__(self, axis: str, place: int) -> Example | None:
        return self.known.get((axis, place))


# --- The files of the run.


WRITTEN = (
    CONFIG,
    "data.npz",
    "metrics.csv",
    "results.csv",
    "predictions.zarr",
    KERNELS,
    "contributions.zarr",
)
PROOFS = ("gradient_factor", "gradient_error", "rule_error", "closure")
CASTS = "casts_error"  # of the gradient, where the loop had autocast


def write_run(
    folder: RunFolder,
    found: xr.Dataset,
    queries: Inputs,
    gallery: Gallery,
    decode: Decode | None,
    check: LeaveOut | None,
) -> None:
    """Write what was found, and declare the folder finished."""
    path = folder.path
    with folder.claim():
        folder.reopen()
        start, change = found["start"].to_numpy(), found["change"].to_numpy()
        made = start + found["contribution"].to_numpy().sum(2) + found["decay"].to_numpy()
        # how far casts, or rounding of gradients, moved the outputs
        cast = float(np.linalg.norm(found["rounding"].to_numpy()))
        result = secant_result(start, start + change, made, cast, no_examples_sentence(found))
        write_data(path / "data.npz", examples(found, queries, gallery, decode))
        write_metrics(folder, found)
        write_results(path / "results.csv", [result])
        predictions = {"f_0": start, "f_T": start + change, "secant": made}
        write_predictions(path / "predictions.zarr", predictions)
        points, outputs = start.shape
        create_kernels(path / KERNELS, points, outputs, found.sizes["example"], room=0)
        finish_kernels(path / KERNELS)
        names = found["example"].to_numpy().tolist()
        decay = found["decay"].to_numpy()
        secant = ContributionsByRule(
            parts=found["contribution"].to_numpy(),
            decay=decay if decay.any() else None,
            outside=found[OUTSIDE].to_numpy() if OUTSIDE in found else None,
            statistics=found[STATISTICS].to_numpy() if STATISTICS in found else None,
            coupling=found[COUPLING].to_numpy() if COUPLING in found else None,
            rounding=found[ROUNDING].to_numpy()
            if rounding_sentence(found) or casts_sentence(found)
            else None,
            by_step=ByStep(found["by_step"].to_numpy(), range(found.sizes["step"] + 1)),
            half_by=found["half_by"].to_numpy() if "half_by" in found else None,
            by_component=shares_of_components(found) if BY_COMPONENT in found else None,
            by_position=found[BY_POSITION].to_numpy() if BY_POSITION in found else None,
        )
        write_contributions(path / "contributions.zarr", {"secant": secant}, names, range(outputs))
        if "effect" in found:
            add_effect(
                path / "contributions.zarr", found["effect"].to_numpy(), found["effect"].attrs
            )
        remove_store(path / STORE)
        if check is not None:
            write_leave_out(path / STORE, check)
        folder.begin(WRITTEN, of := identity_of(TraceFolder(folder)))
        folder.write_sealed(PROVENANCE, provenance(folder))
        steps, outcome = found.sizes["step"], outcome_sentence(found, TraceFolder(folder))
        folder.write_sealed("progress.json", {"step": steps, "steps": steps, "outcome": outcome})
        pictures = folder.write_pictures(draw_run(path))
        checked = [] if check is None else [STORE]
        written = [*WRITTEN, *checked, *pictures]
        folder.finish(
            written, PROVENANCE, identity=of, outcome=outcome, diverged=False, steps=steps
        )
        (path / BEGUN).unlink()


def shares_of_components(found: xr.Dataset) -> ByComponent:
    """What was told apart by component."""
    parts = (
        found[name].to_numpy() for name in (BY_COMPONENT, DECAY_BY_COMPONENT, BY_COMPONENT_STEP)
    )
    return ByComponent(found[COMPONENT].to_numpy().tolist(), *parts)


def identity_of(files: TraceFolder) -> str:
    """Whose results these are: of the loop in config.json, its beginning, and its steps as far as they were seen."""
    found = Sealing("trace")
    found.take((files.folder.path / CONFIG).read_bytes())
    for file in (files.path / START, files.shard / "steps.log"):
        with file.open("rb") as stream:
            stream.seek(-WIDTH, os.SEEK_END)
            found.take(stream.read())  # the seal of what is before it
    return found.digest.hex()


def secant_result(
    start: NDArray[Any], end: NDArray[Any], made: NDArray[Any], cast: float, outside: str
) -> Result:
    """How the sum meets the network at the queries; it misses what casts did, and rounding, and what was done outside
    of all steps, which the note says."""
    moved, missed = float(np.linalg.norm(end - start)), float(np.linalg.norm(made - end))
    size = float(np.linalg.norm(start) + np.linalg.norm(end))
    spread = float(np.square(end - end.mean(0)).sum())
    return Result(
        split="probe",
        machine="secant",
        detail=FOLLOWED,
        relative_error=missed / moved if moved else None,
        floor=rounding_floor(size, moved, float(np.finfo(end.dtype).eps), cast),
        max_error=float(np.abs(made - end).max()),
        r2=1 - missed**2 / spread if spread else None,
        note=outside if moved else "the network did not move here",
    )


def no_examples_sentence(found: xr.Dataset) -> str:
    """What the sum over examples leaves out, in words."""
    return "; ".join(filter(None, (batch_norm_sentence(found), outside_sentence(found))))


def write_metrics(folder: RunFolder, found: xr.Dataset) -> None:
    """Write a row per step."""
    moved = np.linalg.norm(found["by_step"].to_numpy(), axis=(0, 1))
    known = [name for name in (*PROOFS, CASTS) if name in found]
    with MetricsWriter(folder.path / "metrics.csv", ("step", *known, "change")) as metrics:
        for step in range(found.sizes["step"]):
            proofs = {name: float(found[name][step]) for name in known}
            metrics.write({"step": step, **proofs, "change": float(moved[step])})


def examples(
    found: xr.Dataset, queries: Inputs, gallery: Gallery, decode: Decode | None
) -> Mapping[str, NDArray[np.generic]]:
    """The examples that were seen, and the queries, as a person looks at them."""
    names = [str(name) for name in found["example"].to_numpy()]
    arrays: dict[str, NDArray[Any]] = {"classes": np.array([], dtype=str)}
    if MEASURE in found.attrs and found["out"].dtype.kind == "U":
        arrays[OUT_NAME] = found["out"].to_numpy()
    for split, called, rows in (
        ("train", names, gallery.of(names)),
        ("probe", [f"query {k}" for k in range(found.sizes["probe"])], shown(queries)),
    ):
        arrays |= {
            f"{split}_index": np.arange(len(called)),
            f"{split}_name": np.array(called, dtype=str),
        }
        arrays[f"{split}_shown"] = rows
        if decode is not None:
            arrays[f"{split}_text"] = texts(rows, decode)
            if (
                split == "train"
                and BY_POSITION in found
                and rows.ndim == 2
                and np.issubdtype(rows.dtype, np.integer)
            ):
                arrays["train_tokens"] = token_texts(rows, decode)
    return arrays


def outcome_sentence(found: xr.Dataset, files: TraceFolder) -> str:
    """What was proved of the steps, and what there is to say against effects, in words."""
    caveats = found["effect"].attrs["caveats"] if "effect" in found else ""
    broken = "" if files.ended.exists() else "the loop was interrupted after these, or still runs"
    sentences = (
        broken,
        casts_sentence(found),
        rounding_sentence(found),
        batch_norm_sentence(found),
        outside_sentence(found),
        equal_inputs_sentence(found),
        caveats,
    )
    against, processes = "; ".join(filter(None, sentences)), files.processes
    gradient, rule, closure = (short(float(found[name].max())) for name in PROOFS[1:])
    of = f" in {processes} processes" if processes > 1 else ""
    return (
        f"{found.sizes['step']} steps of a loop{of} were followed; at worst a gradient is off by {gradient} of itself, "
        f"a step of its optimizer by {rule}, and a secant by {closure}{'; ' * bool(against)}{against}"
    )


def provenance(folder: RunFolder) -> dict[str, Any]:
    """What wrote the results, and where."""
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
