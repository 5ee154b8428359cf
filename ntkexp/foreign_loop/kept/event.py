"""What is kept of a step of one optimizer: what it took in, its settings, and signatures of all that is large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ntkexp.foreign_loop.circumstances import Circumstances
from ntkexp.foreign_loop.kept.signature import Signed
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.model_call import ModelCall, digests
from ntkexp.foreign_loop.rule.base import IDLE
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel.record.inputs import map_tensors
from ntkexp.shapes import Inputs


@dataclass(frozen=True)
class EventPlace:
    """Which step it was, in order; the `which`-th optimizer's; and its groups of parameters, by their names."""

    index: int
    which: int
    groups: Sequence[Sequence[str]]


def event_of(step: FollowedStep, taken: EventPlace, signed: Signed) -> dict[str, Any]:
    """What is to be kept of a step besides its calls; gradients in it are those that the loop has."""
    heard = set(step.heard)
    stale = any(call.at != taken.index for call in step.calls)
    left = {name: part for name, part in step.gradient.items() if name not in heard and bool(part.any())}
    groups = [{"names": list(names), "settings": dict(step.settings[names[0]])} for names in taken.groups if names]
    return {
        "step": taken.index,
        "optimizer": taken.which,
        "groups": groups,
        "idle": [name for name, linear in step.linear.items() if linear is IDLE],
        "silent": sorted(step.silent),
        "gradient": {name: signed.gradient[name] for name in step.heard},
        "whole": step.gradient if stale else left,
        "after": {name: signed.after[name] for name in step.linear},
        "rule_error": step.rule_error,
    }


@dataclass
class KnownCall:
    """A call that was kept, and the gradient that was kept of it."""

    key: int
    inputs: Inputs
    gradient: Tensor | None = None


@dataclass
class EventWriter:
    """Makes plain content of steps; a call and its gradient are part of the first step that uses them."""

    files: TraceFolder
    known: dict[int, KnownCall] = field(default_factory=dict)
    calls: int = 0

    def event(self, step: FollowedStep, taken: EventPlace, signed: Signed) -> dict[str, object]:
        """What is to be kept of a step."""
        used = [self.call(call) for call in step.calls]
        self.known = {id(call.inputs): self.known[id(call.inputs)] for call in step.calls}
        return {**event_of(step, taken, signed), "calls": used}

    def call(self, call: ModelCall) -> dict[str, object]:
        """What is to be kept of a call that is not kept already."""
        found = self.known.get(id(call.inputs))
        kept: dict[str, object] = {}
        if found is None:
            found = self.known[id(call.inputs)] = KnownCall(self.calls, call.inputs)
            self.calls += 1
            named = {} if call.called is None else {"names": list(call.called)}
            rows = self.files.rows.keep(digests(call.inputs), call.inputs)
            kept = {"at": call.at, "how": call.how.kept, "signed": call.signed, **rows, **named}
        if call.gradient is not found.gradient:
            found.gradient = call.gradient
            kept["gradient"] = call.gradient
        return {"key": found.key, **kept}


def read_calls(
    event: Mapping[str, Any], find: Callable[[Mapping[str, Any]], Inputs], placed: Callable[[Tensor], Tensor]
) -> tuple[ModelCall, ...]:
    """The calls of an event, of each of which all that was kept is given; `find` finds what went in, and `placed` puts
    tensors where they are used."""
    return tuple(
        ModelCall(
            at=call["at"],
            inputs=map_tensors(placed, find(call)),
            called=names_of_kept(call),
            how=Circumstances.read(call.get("how", {})),
            gradient=placed(call["gradient"].clone()),
            signed=call.get("signed"),  # traces of before have none
        )
        for call in event["calls"]
    )


def names_of_kept(call: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the examples of a call."""
    return tuple(call["names"] if "names" in call else (key.partition(" ")[0] for key in call["rows"]))
