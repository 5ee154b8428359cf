"""`ntkexp kernel ensemble`: many networks on a one-dimensional problem, beside both processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.train import ensure_writable, limit_threads
from ntkexp.report.progress import listener
from ntkexp.text import aligned, short

if TYPE_CHECKING:
    from ntkexp.ensemble.compare import Comparison, TrainedNetworks
    from ntkexp.ensemble.problem import EnsembleProblem
    from ntkexp.experiment.experiment import Experiment

USUAL = ("data=circle", "data.train=6", "data.probe=0", "data.test=200", "model.width=256", "steps=500")


@dataclass(frozen=True, kw_only=True)
class EnsembleRequest:
    """What the command line asks for, by the names of its options."""

    overrides: Sequence[str]
    networks: int
    out: Path
    quiet: bool
    as_json: bool
    trust: Sequence[str]
    config_dir: Path | None


def ensemble(asked: EnsembleRequest) -> None:
    """Train, compare, draw and show."""
    limit_threads(asked.overrides)
    from ntkexp.config.compose import compose

    experiment = compose([*USUAL, *asked.overrides], asked.config_dir, asked.trust)
    folder = ensure_writable(asked.out.expanduser())
    from ntkexp.ensemble.compare import comparisons, ensemble
    from ntkexp.ensemble.problem import problem
    from ntkexp.run.environment import fix_circumstances

    fix_circumstances(experiment)
    given, listening = problem(experiment), listener(asked.quiet)
    listening.start("networks", 2 * asked.networks, 0)
    before = {"all layers": 0, "readout": asked.networks}
    try:
        found = ensemble(
            experiment, given, asked.networks, lambda name, done: listening.step(before[name] + done, None, None)
        )
    finally:
        listening.stop()
    table = comparisons(found, given.train)
    files = write_files(folder, experiment, given, found, table)
    show(table, files, asked)


def write_files(
    folder: Path,
    experiment: Experiment,
    given: EnsembleProblem,
    found: Sequence[TrainedNetworks],
    table: Sequence[Comparison],
) -> list[Path]:
    """Write the picture, its numbers, and the comparison; the files."""
    from matplotlib import rc_context

    from ntkexp.cli.kernel.tables import save
    from ntkexp.report.plots.ensemble import Panel, draw
    from ntkexp.report.plots.run_plots import METADATA, write
    from ntkexp.report.plots.style import RC

    name = f"ensemble-{experiment.model.option}-w{experiment.model.width}-n{len(found[0].outputs)}-s{experiment.seed}"
    new = slice(given.train, None)
    panels = [
        Panel(
            {"ntk": "all layers learn", "nngp": "the readout alone learns"}[each.process],
            each.process,
            each.outputs[:, new].numpy(),
            each.theory.mean[new].numpy(),
            each.theory.deviation[new].numpy(),
        )
        for each in found
    ]
    learned = (given.places[: given.train].numpy(), given.targets[: given.train, 0].numpy())
    with rc_context(RC):
        figure = draw(given.places[new].numpy(), panels, learned, given.axis, answer(table, experiment))
        files = [write(figure, folder / f"{name}.{kind}", kind) for kind in METADATA]
    columns = ["place", "target"] + [f"{each.name} {what}" for each in found for what in
                                     ("mean", "sd", "process mean", "process sd")]  # fmt: skip
    curves = [
        curve[new].tolist()
        for each in found
        for curve in (each.observed.mean, each.observed.deviation, each.theory.mean, each.theory.deviation)
    ]
    rows = zip(given.places[new].tolist(), given.targets[new, 0].tolist(), *curves, strict=True)
    files.append(save(folder, f"{name}.csv", columns, rows))
    heads = [field.name for field in fields(table[0])]
    return [*files, save(folder, f"{name}.comparison.csv", heads, map(astuple, table))]


def answer(table: Sequence[Comparison], experiment: Experiment) -> str:
    """What the picture says: each kind of networks beside its own process, on average over points and at the worst."""
    own = [row for row in table if (row.networks == "all layers") == (row.process == "ntk")]
    trained = f"{own[0].count} networks of width {experiment.model.width}, trained for {experiment.steps} steps"
    return f"The means of {trained}, lie off those of their Gaussian processes {'; '.join(map(distance_in_words, own))}"


def distance_in_words(row: Comparison) -> str:
    """How far the mean of one kind of networks is from its process."""
    if not math.isfinite(row.mean):
        return f"by no number ({row.networks}: networks or process are not finite, or have no spread)"
    return (
        f"by {short(row.mean)} standard errors in the root mean square over {row.points} points, {short(row.worst)} at "
        f"worst ({row.networks})"
    )


def show(table: Sequence[Comparison], files: Sequence[Path], asked: EnsembleRequest) -> None:
    """Show the comparison, and where the picture is."""
    from dataclasses import asdict

    from ntkexp.records.json_file import to_text

    if asked.as_json:
        sys.stdout.write(
            to_text({"comparison": [asdict(row) for row in table], "files": [str(path) for path in files]})
        )
    elif not asked.quiet:
        header = ["networks train", "process", "networks", "points"]
        header += ["means apart (standard errors, RMS)", "at worst", "ratio of deviations"]
        lines = [
            [row.networks, row.process.upper(), str(row.count), str(row.points)]
            + [short(number) for number in (row.mean, row.worst, row.deviation)]
            for row in table
        ]
        sys.stdout.write(f"{aligned(header, lines, [False, False, *[True] * 5])}\n\n")
        sys.stdout.write("".join(f"{path}\n" for path in files))
