"""`ntkexp kernel ensemble`: compare ensembles of networks with Gaussian processes.

The networks learn a one-dimensional problem.
They are compared with the NTK and NNGP processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import CommonOptions, Overrides, ensure_writable, write_json
from ntkexp.report.progress import progress_listener
from ntkexp.report.tables import format_text, tabulate
from ntkexp.text import short

if TYPE_CHECKING:
    from ntkexp.ensemble import Comparison, EnsembleProblem, TrainedNetworks
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.report.plots.run_plots import Panel


EXPLANATION = (
    "The points lie outside the training data, where training leaves the process at least a tenth "
    "of its standard deviation; 'by chance' is the share of draws of the process that are as far "
    "off, in mean or covariance."
)
TEXTS = ("networks train", "process")
NUMBERS = (
    "networks",
    "points",
    "means apart (standard errors, RMS)",
    "at worst",
    "ratio of deviations",
    "covariances apart",
    "by chance",
)
"""The columns of the printed comparison."""

DEFAULT_OVERRIDES = (
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
        int,
        typer.Option(
            metavar="N",
            min=2,
            help="The number of networks of each kind.",
        ),
    ] = 100,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for the picture.")
    ] = Path("outputs/ensembles"),
    *,
    common: CommonOptions,
) -> None:
    """Compare many trained networks with Gaussian processes.

    The networks learn a function on a circle.
    """
    experiment = common.compose([*DEFAULT_OVERRIDES, *(overrides or [])])
    folder = ensure_writable(out.expanduser())
    from ntkexp.ensemble import comparisons, ensemble as train_networks, problem
    from ntkexp.run.environment import fix_circumstances

    fix_circumstances(experiment)
    learning_problem = problem(experiment)
    progress = progress_listener(common.quiet)
    progress.start("networks", 2 * networks, 0)
    networks_before = {"all layers": 0, "readout": networks}
    try:
        trained = train_networks(
            experiment,
            learning_problem,
            networks,
            lambda name, done: progress.step(networks_before[name] + done),
        )
    finally:
        progress.stop()
    table = comparisons(trained, learning_problem.train)
    sentence = describe_comparison(table, experiment)
    files = write_files(folder, experiment, learning_problem, trained, table)
    print_comparison(table, sentence, files, quiet=common.quiet, as_json=common.as_json)


def write_files(
    folder: Path,
    experiment: Experiment,
    problem: EnsembleProblem,
    trained: Sequence[TrainedNetworks],
    table: Sequence[Comparison],
) -> list[Path]:
    """Write the picture, its data and the comparison. Return the paths of the files."""
    from ntkexp.cli.kernel_predict import save
    from ntkexp.experiment.identity import identity
    from ntkexp.report.plots.rendering import METADATA, write
    from ntkexp.report.plots.run_plots import draw_ensemble
    from ntkexp.report.plots.style import house_style

    model = experiment.model
    networks = len(trained[0].outputs)
    # other settings give other files, so a killed command cannot leave files of two settings
    # under one name
    digest = identity(experiment)[:12]
    name = f"ensemble-{model.option}-w{model.width}-n{networks}-s{experiment.seed}-{digest}"
    train_data = (
        problem.places[: problem.train].numpy(),
        problem.targets[: problem.train, 0].numpy(),
    )
    with house_style():
        figure = draw_ensemble(
            problem.places[problem.train :].numpy(),
            panels_of(trained, problem.train),
            train_data,
            problem.axis,
            describe_comparison(table, experiment),
        )
        files = [write(figure, folder / f"{name}.{kind}", kind) for kind in METADATA]
    files.append(save(folder, f"{name}.csv", *curves_of(trained, problem)))
    columns = [field.name for field in fields(table[0])]
    files.append(save(folder, f"{name}.comparison.csv", columns, map(astuple, table)))
    return files


def panels_of(trained: Sequence[TrainedNetworks], train: int) -> list[Panel]:
    """Return a panel for each kind of networks, at the points after the first `train`."""
    from ntkexp.report.plots.run_plots import Panel, Theory

    theories = {
        networks.process: Theory(
            networks.process,
            networks.theory.mean[train:].numpy(),
            networks.theory.deviation[train:].numpy(),
        )
        for networks in trained
    }
    panels = []
    for networks in trained:
        own = theories[networks.process]
        others = [theory for theory in theories.values() if theory is not own]
        outputs = networks.outputs[:, train:].numpy()
        panels.append(Panel(TITLES[networks.process], outputs, own, others))
    return panels


def curves_of(
    trained: Sequence[TrainedNetworks], problem: EnsembleProblem
) -> tuple[list[str], Iterable[Sequence[float]]]:
    """Return the header and rows of the picture's data: a row for each point that is
    not a training example."""
    header = ["place", "target"]
    columns = [problem.places, problem.targets[:, 0]]
    for networks in trained:
        header += [
            f"{networks.name} {quantity}"
            for quantity in ("mean", "sd", "process mean", "process sd")
        ]
        columns += [networks.observed.mean, networks.observed.deviation]
        columns += [networks.theory.mean, networks.theory.deviation]
    rows = zip(*(column[problem.train :].tolist() for column in columns), strict=True)
    return header, rows


TITLES = {"ntk": "all layers learn", "nngp": "the readout alone learns"}
"""The title of each panel, by the process that describes its networks."""

LEARNS = {
    "all layers": "where all layers learn",
    "readout": "where the readout alone learns",
}


def describe_comparison(table: Sequence[Comparison], experiment: Experiment) -> str:
    """Describe the comparison of each kind of networks with the Gaussian processes."""
    kinds = dict.fromkeys(row.networks for row in table)
    descriptions = [
        f"{LEARNS[kind]}, they {describe_processes([row for row in table if row.networks == kind])}"
        for kind in kinds
    ]
    trained = f"{table[0].count} networks of width {experiment.model.width} after {experiment.steps} steps"
    return f"{trained}: {'; '.join(descriptions)}; for draws of a process, both distances are about 1"


def describe_processes(rows: Sequence[Comparison]) -> str:
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
            f"{distance:.2f}" if distance < 100 else short(distance)
            for distance in (row.mean, row.covariance)
        )
        verb = "could be draws of" if row.follows else "are no draws of"
        kinds[verb].append(f"{name} (mean off by {mean}, covariance by {covariance})")
    return " and ".join(
        f"{verb} {' or '.join(names)}" for verb, names in kinds.items() if names
    )


def print_comparison(
    table: Sequence[Comparison],
    sentence: str,
    files: Sequence[Path],
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print the comparison, its description and the paths of the files."""

    if as_json:
        rows = [asdict(row) for row in table]
        write_json(
            {
                "comparison": rows,
                "answer": sentence,
                "files": [str(path) for path in files],
            }
        )
    elif not quiet:
        lines = [
            (
                row.networks,
                row.process.upper(),
                row.count,
                f"{row.points} of {row.among}",
                row.mean,
                row.worst,
                row.deviation,
                row.covariance,
                row.chance,
            )
            for row in table
        ]
        text = format_text(tabulate([*TEXTS, *NUMBERS], lines, NUMBERS))
        sys.stdout.write(f"{text}\n\n{sentence}.\n{EXPLANATION}\n\n")
        sys.stdout.write("".join(f"{path}\n" for path in files))
