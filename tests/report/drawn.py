"""The captions and the files of pictures."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ntkexp.report.plots.run_plots import all_files_of
from ntkexp.report.plots.style import CAPTION
from ntkexp.report.run import Run


def caption_of(figure: Figure) -> str:
    """Return the caption of a picture as one line."""
    texts = [text.get_text() for text in figure.texts if text.get_gid() == CAPTION]
    return " ".join(texts).replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


def save(run: Run, folder: Path) -> list[Path]:
    """Write all pictures of a run into a folder. Return the paths of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in all_files_of(run):
        written.append(folder / name)
        written[-1].write_text(content, encoding="utf-8")
    return written
