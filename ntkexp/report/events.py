"""The TensorBoard events of a finished run, written from its records.

    metrics/<column>            measured numbers at each step
    ladder/<split>/<machine>    relative errors of kernel machines, at the last step
    plots/<picture>             the pictures of the run, at the last step

The file is written after the run, so it holds each number exactly once, even if the run
was interrupted and resumed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import being_written
from ntkexp.records.folder import RunFolder
from ntkexp.report.live_log import (
    EVENT_VERSION,
    NAME,
    PLACE,
    event_files,
    ladder_name,
    metric_name,
)
from ntkexp.report.run import Run, load_tables

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary


def refuse_without_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise Mistake(
            "events need tensorboard, which is not installed: pip install 'ntkexp[tensorboard]'"
        )


def ensure_events(folder: Path) -> Path:
    """Return the event file of a finished run. Write it if it is missing."""
    path = folder / PLACE / f"{NAME}{RunFolder(folder).identity[:12] or 'run'}"
    if not path.is_file():
        write_events(load_tables(folder), path)
    for other in {folder / name for name in event_files(folder)} - {path}:
        other.unlink()  # TensorBoard would merge another file into this run
    return path


def write_events(run: Run, path: Path) -> None:
    """Write all events. Run folders store no times of steps, so each event has the time
    when metrics.csv was written."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  an extra
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  an extra

    then = (run.path / "metrics.csv").stat().st_mtime
    with being_written(path) as file:
        records = RecordWriter(file)
        records.write(
            Event(wall_time=then, file_version=EVENT_VERSION).SerializeToString()
        )
        for step, summary in summaries(run):
            records.write(
                Event(wall_time=then, step=step, summary=summary).SerializeToString()
            )


def summaries(run: Run) -> Iterator[tuple[int, Summary]]:
    """Yield a pair (step, summary) for each number and picture."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  an extra

    from ntkexp.report.plots.rendering import png  # noqa: PLC0415  slow to import
    from ntkexp.report.plots.run_plots import figure_of, gallery  # noqa: PLC0415  slow to import

    for column in run.metrics.columns.drop("step"):
        measured = run.series(column)
        for step, number in zip(measured["step"], measured[column], strict=True):
            value = Summary.Value(tag=metric_name(column), simple_value=float(number))
            yield int(step), Summary(value=[value])
    last = run.last_step
    for row in run.ladder:
        if row.relative_error is not None:
            tag = ladder_name(row.split, row.machine)
            yield (
                last,
                Summary(
                    value=[Summary.Value(tag=tag, simple_value=row.relative_error)]
                ),
            )
    for name, draw in gallery():
        figure = figure_of(run, draw)
        if figure is not None:
            content = png(figure)
            # IHDR, the first chunk of a PNG
            width, height = struct.unpack(">II", content[16:24])
            image = Summary.Image(
                width=width, height=height, encoded_image_string=content
            )
            yield last, Summary(value=[Summary.Value(tag=f"plots/{name}", image=image)])
