"""Pictures of runs. Each file in `figures/` draws one picture,
whose title answers one question.

Each module imports only from the modules listed before it:

style                colours, sizes, settings, labels, titles and captions
canvas               the place of a picture: a new figure, or axes of the user
error_panels         axes for relative errors, with a strip for exact kernel machines
rendering            SVG and PNG files
examples             pictures of explanations
attribution_plots    the pictures of `found.plot`
figures              the pictures of a run
together             the pictures of a sweep
run_plots            the pictures of `run.plot`, of many runs and of ensembles
sweep_plots          the pictures of `sweep.plot`

This module imports matplotlib before any other file does. During this import, the
settings of the user (`matplotlibrc` files, MATPLOTLIBRC and MPLBACKEND) are ignored,
because an invalid backend would make the import fail."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# suppress warnings: without a home folder, matplotlib warns about its cache folder
logging.getLogger("matplotlib").setLevel(logging.ERROR)

SETTINGS = "matplotlibrc"


@contextmanager
def without_settings() -> Iterator[None]:
    """Make matplotlib read its default settings, not the user's, inside the block."""
    saved = {
        name: os.environ.pop(name)
        for name in ("MPLBACKEND", "MATPLOTLIBRC")
        if name in os.environ
    }
    exists, spec = os.path.exists, find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        # MATPLOTLIBRC has precedence over the file in the home folder
        os.environ["MATPLOTLIBRC"] = str(
            Path(spec.origin).parent / "mpl-data" / SETTINGS
        )
    # matplotlib first looks for a settings file in the working folder. Hide this file.
    # (Moving to another working folder instead would affect other threads.)
    os.path.exists = lambda path: path != SETTINGS and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists
        os.environ.pop("MATPLOTLIBRC", None)
        os.environ.update(saved)


with without_settings():
    import_module("matplotlib")
