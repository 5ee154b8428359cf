"""`ntkexp attribute`: a trace that a training loop left becomes a run, in a later process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from torch import nn


def attribute(folder: Path, model: str | None, loss: str | None, trust: Sequence[str], *, effects: bool) -> None:
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
    if effects and loss is None:
        raise Mistake("--effects: effects are derivatives of the gradient; add --loss=FILE.py:FUNCTION, as for follow")
    trace = loaded(files, built(model, trust))
    trace.loss = None if loss is None else found_in(loss, "loss", trust)
    trace.attribute(effects=effects)
    run = load_run(files.folder.path)
    sys.stdout.write(f"{run.outcome}\n{sentence(run.ladder)}\n{run.path}\n")


def built(model: str, trust: Sequence[str]) -> nn.Module:
    """The module of the user's function, in a file that is trusted."""
    from torch import nn

    found = found_in(model, "model", trust)()
    if not isinstance(found, nn.Module):
        raise Mistake(f"model={model}: it returns a {type(found).__name__}; let it return an nn.Module")
    return found


def found_in(path: str, key: str, trust: Sequence[str]) -> Callable[..., Any]:
    """A function of the user's, FILE.py:FUNCTION, in a file that is trusted."""
    from ntkexp.config.target import admit, refuse_untrusted
    from ntkexp.model.foreign.user_file import load
    from ntkexp.model.module import Module, file_and_function, function

    place = Module(path=path)
    refuse_untrusted(place, key, admit(trust))
    return function(load(place.file, f"{key}={path}"), file_and_function(path)[2], f"{key}={path}")
