"""A finished run for TensorBoard: one file of events, made from the run's records.

    metrics/<column>            numbers along the run, each at the steps at which it was measured
    ladder/<split>/<machine>    relative errors, at the last step
    plots/<picture>             the pictures of the run, at the last step

Training knows nothing of it. The file appears whole, so no point is in it twice, however often the run was interrupted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import being_written
from ntkexp.records.folder import RunFolder
from ntkexp.report.live_log import FORMAT, NAME, PLACE, event_files, ladder_name, metric_name
from ntkexp.report.run import Run, load_tables

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary


def refuse_without_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise Mistake(
            "events need tensorboard, which is not installed: pip install 'ntkexp[tensorboard]'"
        )


def ensure_events(folder: Path) -> Path:
    """The event file of a finished run, written if it is not there."""
    path = folder / PLACE / f"{NAME}{RunFolder(folder).identity[:12] or 'run'}"
    if not path.is_file():
        write_events(load_tables(folder), path)
    for other in {folder / name for name in event_files(folder)} - {path}:
        other.unlink()  # of another run, which would be shown as this one
    return path


def write_events(run: Run, path: Path) -> None:
    """Write all events. Records keep no time of a step, so all carry the time at which the last was measured."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  an extra
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  the same

    then = (run.path / "metrics.csv").stat().st_mtime
    with being_written(path) as file:
        records = RecordWriter(file)
        records.write(Event(wall_time=then, file_version=FORMAT).SerializeToString())
        for step, summary in summaries(run):
            records.write(Event(wall_time=then, step=step, summary=summary).SerializeToString())


def summaries(run: Run) -> Iterator[tuple[int, Summary]]:
    """What there is to see, with its step: every number, and the pictures at the last step."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  an extra

    from ntkexp.report.plots.rendering import png  # noqa: PLC0415  slow, and wanted after a run
    from ntkexp.report.plots.run_plots import figure_of, gallery  # noqa: PLC0415  slow, and wanted after a run

    for column in run.metrics.columns.drop("step"):
        measured = run.series(column)
        for step, value in zip(measured["step"], measured[column], strict=True):
            yield (
                int(step),
                Summary(value=[Summary.Value(tag=metric_name(column), simple_value=float(value))]),
            )
    last = int(run.metrics["step"].iloc[-1])
    for row in run.ladder:
        if row.relative_error is not None:
            tag = ladder_name(row.split, row.machine)
            yield last, Summary(value=[Summary.Value(tag=tag, simple_value=row.relative_error)])
    for name, draw in gallery():
        if (figure := figure_of(run, draw)) is not None:
            content = png(figure)
            width, height = struct.unpack(">II", content[16:24])  # of the first chunk of a PNG
            image = Summary.Image(width=width, height=height, encoded_image_string=content)
            yield last, Summary(value=[Summary.Value(tag=f"plots/{name}", image=image)])
