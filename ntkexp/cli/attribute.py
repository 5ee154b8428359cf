"""`ntkexp attribute`: a trace that a training loop left becomes a run, in a later process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from torch import nn

    from ntkexp.foreign_loop.store.files import TraceFolder
    from ntkexp.foreign_loop.trace import Trace


def attribute(folder: Path, user: UserCode, *, effects: bool, quiet: bool = False) -> None:
    """Attribute the trace, with what the user's functions give; what came out is told."""
    from ntkexp.foreign_loop.follow import trace_in
    from ntkexp.report.run import load_run
    from ntkexp.report.sentence import sentence

    files = trace_in(folder)
    if user.model is None and user.again is None:
        kind = "FILE.py:FUNCTION"
        raise Mistake(
            f"{folder}: the module that was followed is not in it; give a function that builds it, --model={kind}"
        )
    if effects and user.loss is None and user.again is None:
        raise Mistake("--effects: effects are derivatives of the gradient; add --loss=FILE.py:FUNCTION, as for follow")
    trace = user.trace(files)
    again = user.found("again") if effects else None
    trace.attribute(effects=effects, decode=user.found("decode"), again=again, quiet=quiet)
    run = load_run(files.folder.path)
    sys.stdout.write(f"{run.outcome}\n{sentence(run.ladder)}\n{run.path}\n")


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """Functions of the user's, each as FILE.py:FUNCTION, in files that are trusted."""

    trust: Sequence[str]
    model: str | None = None
    loss: str | None = None
    again: str | None = None
    decode: str | None = None

    def found(self, key: str) -> Callable[..., Any] | None:
        """One of the functions, if it was given."""
        path = getattr(self, key)
        return None if path is None else found_in(path, key, self.trust)

    def trace(self, files: TraceFolder) -> Trace:
        """The trace, with module and loss; those that are not given are what the loop itself gives to `follow`."""
        from ntkexp.foreign_loop.follow import loaded

        again, module = self.found("again"), None if self.model is None else built(self.model, self.trust)
        first = None if again is None or (self.model and self.loss) else once_more(again)
        if module is None:
            assert first is not None  # one of the two functions was given
            module = first.module
        trace = loaded(files, module)
        trace.loss = self.found("loss") or (None if first is None else first.loss)
        return trace


def once_more(again: Callable[..., Any]) -> Trace:
    """The loop of the user's function, carried out as it is."""
    from ntkexp.foreign_loop.again import Weighing, trained_again

    return trained_again(again, Weighing())


def built(model: str, trust: Sequence[str]) -> nn.Module:
    """The module of the user's function, in a file that is trusted."""
    from torch import nn

    found = found_in(model, "model", trust)()
    if not isinstance(found, nn.Module):
        raise Mistake(f"model={model}: it returns a {type(found).__name__}; let it return an nn.Module")
    return found


def found_in(path: str, key: str, trust: Sequence[str]) -> Callable[..., Any]:
    """A function of the user's, FILE.py:FUNCTION, in a file that is trusted."""
    from ntkexp.config.build import admit, refuse_untrusted
    from ntkexp.model.foreign import load
    from ntkexp.model.libraries import Module, file_and_function, function

    place = Module(path=path)
    refuse_untrusted(place, key, admit(trust))
    return function(load(place.file, f"{key}={path}"), file_and_function(path)[2], f"{key}={path}")
