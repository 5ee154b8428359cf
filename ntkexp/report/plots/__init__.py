"""Pictures of a run: one file per picture in `figures/`, each answering one question, which is its title.

matplotlib is imported here, before any file that draws, and reads no settings of the user's: neither `matplotlibrc` in
the working folder or elsewhere, nor MATPLOTLIBRC, nor MPLBACKEND. A backend that is none would end the import.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

logging.getLogger("matplotlib").setLevel(
    logging.ERROR
)  # without a home it would say where it keeps its cache instead

SETTINGS = "matplotlibrc"


@contextmanager
def without_settings() -> Iterator[None]:
    """Let matplotlib find the settings that it comes with, which it looks for last, in place of the user's."""
    saved = {
        name: os.environ.pop(name) for name in ("MPLBACKEND", "MATPLOTLIBRC") if name in os.environ
    }
    exists, spec = os.path.exists, find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        os.environ["MATPLOTLIBRC"] = str(
            Path(spec.origin).parent / "mpl-data" / SETTINGS
        )  # before those in the home
    # No variable comes before the working folder's file, and to change the folder would be felt by other threads
    os.path.exists = lambda path: path != SETTINGS and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists
        os.environ.pop("MATPLOTLIBRC", None)
        os.environ.update(saved)


with without_settings():
    import_module("matplotlib")
