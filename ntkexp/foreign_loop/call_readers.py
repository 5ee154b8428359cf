"""Readers of the calls of a loop, each under its circumstances; what was found out of the module stays known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.circumstances import LayerModes
from ntkexp.foreign_loop.model_call import ModelCall
from ntkexp.foreign_loop.signed_outputs import Replayed
from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class CallReaders:
    """One for the module in each of its modes."""

    called: CalledModule
    trained: frozenset[str]
    readers: dict[LayerModes, Reader] = field(default_factory=dict)

    def pulled(self, call: ModelCall, weights: Weights) -> tuple[Features, Replayed]:
        """Jᵀℓ′ of every example of a call, at these weights; and the call as it was replayed for that."""
        if call.gradient is None:
            raise ValueError("a call without a gradient")
        reader = self.reader(call)
        tape = reader.record(weights, call.inputs)
        replayed = Replayed(reader.function, weights, call.inputs, tape.outputs)
        return reader.weighted(tape, call.gradient), replayed

    def reader(self, call: ModelCall) -> Reader:
        """The one of a call."""
        function, modes = self.called.at(call.how), call.how.modes
        if modes not in self.readers:
            self.readers[modes] = Reader(function, self.trained, programs=ProgramCache())
        return replace(self.readers[modes], function=function, known=bool(call.how.states))
