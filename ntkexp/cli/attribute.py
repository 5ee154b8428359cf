"""`ntkexp attribute`: a trace that a training loop left becomes a run, in a later process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from torch import nn


def attribute(folder: Path, model: str | None, trust: Sequence[str]) -> None:
    """Attribute the trace, with a module that the user's function builds; what came out is told."""
    from ntkexp.foreign_loop.kept.load import loaded, trace_in
    from ntkexp.report.run import load_run
    from ntkexp.report.sentence import sentence

    files = trace_in(folder)
    if model is None:
        kind = "FILE.py:FUNCTION"
        raise Mistake(
            f"{folder}: the module that was followed is not in it; give a function that builds it, --model={kind}"
        )
    loaded(files, built(model, trust)).attribute()
    run = load_run(files.folder.path)
    sys.stdout.write(f"{run.outcome}\n{sentence(run.ladder)}\n{run.path}\n")


def built(model: str, trust: Sequence[str]) -> nn.Module:
    """The module of the user's function, in a file that is trusted."""
    from torch import nn

    from ntkexp.config.target import admit, refuse_untrusted
    from ntkexp.model.foreign.user_file import load
    from ntkexp.model.module import Module, file_and_function, function

    architecture = Module(path=model)
    refuse_untrusted(architecture, "model", admit(trust))
    build = function(load(architecture.file, f"model={model}"), file_and_function(model)[2], f"model={model}")
    found = build()
    if not isinstance(found, nn.Module):
        raise Mistake(f"model={model}: it returns a {type(found).__name__}; let it return an nn.Module")
    return found
