"""`ntkexp kernel ensemble`: compare ensembles of networks with Gaussian processes.

The networks learn a one-dimensional problem. They are compared with the NTK and NNGP processes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import CommonOptions, Overrides, ensure_writable
from ntkexp.report.progress import progress_listener
from ntkexp.text import aligned, short

if TYPE_CHECKING:
    from ntkexp.ensemble import Comparison, EnsembleProblem, TrainedNetworks
    from ntkexp.experiment.experiment import Experiment


BASIS = (
    "Points are those that were not learned, where the process has kept a tenth of the deviation that it had before "
    "training; 'by chance' is how often draws of the process are as far off, by mean or by covariance."
)
USUAL = (
    "data=circle",
    "data.train=6",
    "data.query=0",
    "data.test=200",
    "model.width=256",
    "steps=500",
)


def ensemble(
    overrides: Overrides = None,
    networks: Annotated[
        int, typer.Option("--networks", metavar="N", min=2, help="How many networks of each kind.")
    ] = 100,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder for the picture.")
    ] = Path("outputs/ensembles"),
    *,
    common: CommonOptions,
) -> None:
    """Compare many trained networks with Gaussian processes.

    The networks learn a function on a circle.
    """
    experiment = common.compose([*USUAL, *(overrides or [])])
    folder = ensure_writable(out.expanduser())
    from ntkexp.ensemble import comparisons, problem
    from ntkexp.ensemble import ensemble as train_networks
    from ntkexp.run.environment import fix_circumstances

    fix_circumstances(experiment)
    given, listening = problem(experiment), progress_listener(common.quiet)
    listening.start("networks", 2 * networks, 0)
    before = {"all layers": 0, "readout": networks}
    try:
        trained = train_networks(
            experiment,
            given,
            networks,
            lambda name, done: listening.step(before[name] + done),
        )
    finally:
        listening.stop()
    table = comparisons(trained, given.train)
    sentence = answer(table, experiment)
    files = write_files(folder, experiment, given, trained, table)
    show(table, sentence, files, quiet=common.quiet, as_json=common.as_json)


def write_files(
    folder: Path,
    experiment: Experiment,
    given: EnsembleProblem,
    trained: Sequence[TrainedNetworks],
    table: Sequence[Comparison],
) -> list[Path]:
    """Write the picture, its data and the comparison. Return the paths of the files."""
    from ntkexp.cli.kernel_predict import save
    from ntkexp.report.plots.rendering import METADATA, write
    from ntkexp.report.plots.run_plots import Panel, Theory
    from ntkexp.report.plots.run_plots import draw_ensemble as draw
    from ntkexp.report.plots.style import house_style

    name = f"ensemble-{experiment.model.option}-w{experiment.model.width}-n{len(trained[0].outputs)}-s{experiment.seed}"
    new = slice(given.train, None)
    theories = {
        each.process: Theory(
            each.process, each.theory.mean[new].numpy(), each.theory.deviation[new].numpy()
        )
        for each in trained
    }
    panels = [
        Panel(
            {"ntk": "all layers learn", "nngp": "the readout alone learns"}[each.process],
            each.outputs[:, new].numpy(),
            theories[each.process],
            [theory for process, theory in theories.items() if process != each.process],
        )
        for each in trained
    ]
    learned = (given.places[: given.train].numpy(), given.targets[: given.train, 0].numpy())
    with house_style():
        figure = draw(
            given.places[new].numpy(), panels, learned, given.axis, answer(table, experiment)
        )
        files = [write(figure, folder / f"{name}.{kind}", kind) for kind in METADATA]
    columns = ["place", "target"] + [f"{each.name} {what}" for each in trained for what in
                                     ("mean", "sd", "process mean", "process sd")]  # fmt: skip
    curves = [
        curve[new].tolist()
        for each in trained
        for curve in (
            each.observed.mean,
            each.observed.deviation,
            each.theory.mean,
            each.theory.deviation,
        )
    ]
    rows = zip(given.places[new].tolist(), given.targets[new, 0].tolist(), *curves, strict=True)
    files.append(save(folder, f"{name}.csv", columns, rows))
    heads = [field.name for field in fields(table[0])]
    return [*files, save(folder, f"{name}.comparison.csv", heads, map(astuple, table))]


LEARNS = {"all layers": "where all layers learn", "readout": "where the readout alone learns"}


def answer(table: Sequence[Comparison], experiment: Experiment) -> str:
    """Describe, for each kind of networks, the Gaussian processes that the test does not reject."""
    kinds = dict.fromkeys(row.networks for row in table)
    each = [
        f"{LEARNS[kind]}, they {stand([row for row in table if row.networks == kind])}"
        for kind in kinds
    ]
    trained = f"{table[0].count} networks of width {experiment.model.width} after {experiment.steps} steps"
    return f"{trained}: {'; '.join(each)}; draws are off by about 1"


def stand(rows: Sequence[Comparison]) -> str:
    """Describe the comparison of one kind of networks with each Gaussian process."""
    kinds: dict[str, list[str]] = {
        "could be draws of": [],
        "are no draws of": [],
        "have no distance to": [],
    }
    for row in rows:
        name = f"the {row.process.upper()} process"
        if math.isnan(row.chance):
            kinds["have no distance to"].append(
                f"{name} (it or networks are not finite, or it has no spread)"
            )
            continue
        mean, covariance = (
            f"{off:.2f}" if off < 100 else short(off) for off in (row.mean, row.covariance)
        )
        verb = "could be draws of" if row.follows else "are no draws of"
        kinds[verb].append(f"{name} (mean off by {mean}, covariance by {covariance})")
    return " and ".join(f"{verb} {' or '.join(names)}" for verb, names in kinds.items() if names)


def show(
    table: Sequence[Comparison], sentence: str, files: Sequence[Path], *, quiet: bool, as_json: bool
) -> None:
    """Print the comparison, its description and the paths of the files."""
    from ntkexp.records.atomic import to_text

    if as_json:
        rows = [asdict(row) for row in table]
        sys.stdout.write(
            to_text(
                {"comparison": rows, "answer": sentence, "files": [str(path) for path in files]}
            )
        )
    elif not quiet:
        header = ["networks train", "process", "networks", "points"]
        header += [
            "means apart (standard errors, RMS)",
            "at worst",
            "ratio of deviations",
            "covariances apart",
            "by chance",
        ]
        lines = [
            [row.networks, row.process.upper(), str(row.count), f"{row.points} of {row.among}"]
            + [
                short(number)
                for number in (row.mean, row.worst, row.deviation, row.covariance, row.chance)
            ]
            for row in table
        ]
        sys.stdout.write(
            f"{aligned(header, lines, [False, False, *[True] * 7])}\n\n{sentence}.\n{BASIS}\n\n"
        )
        sys.stdout.write("".join(f"{path}\n" for path in files))
