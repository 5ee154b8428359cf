"""Tangent and secant kernels of a network, computed from a recording of its operations.

Each module imports only from the modules listed before it:

record      record the operations of a function on one batch as a tape; run them again as a program
secant      difference rules: the exact change of the outputs when the weights change, as J̄Δθ
features    Jacobians as blocks of factors or rows; kernels and adjoints computed from them
sketch      kernels of randomly projected gradients, with error bars
read        from tapes to Jacobians: checks, programs, and the batches in which examples are read

Other parts of the package import the names below from here. Each name's file is
imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ntkexp.kernel.features.adjoint import Adjoint as Adjoint
    from ntkexp.kernel.features.directional import (
        DirectionalGradients as DirectionalGradients,
    )
    from ntkexp.kernel.features.gram import gram as gram
    from ntkexp.kernel.features.jacobian import Jacobian as Jacobian
    from ntkexp.kernel.read.plan import ChosenOutputs as ChosenOutputs
    from ntkexp.kernel.read.program_cache import ProgramCache as ProgramCache
    from ntkexp.kernel.read.reader import Reader as Reader
    from ntkexp.kernel.record.casts import Casts as Casts
    from ntkexp.kernel.record.tape import Tape as Tape
    from ntkexp.kernel.record.taping import (
        columns as columns,
        plain_kernels as plain_kernels,
    )
    from ntkexp.kernel.secant.call import NoRule as NoRule
    from ntkexp.kernel.secant.segment import Closure as Closure, Segment as Segment
else:
    FILES = {
        "Adjoint": "features.adjoint",
        "DirectionalGradients": "features.directional",
        "gram": "features.gram",
        "Jacobian": "features.jacobian",
        "ChosenOutputs": "read.plan",
        "ProgramCache": "read.program_cache",
        "Reader": "read.reader",
        "Casts": "record.casts",
        "Tape": "record.tape",
        "columns": "record.taping",
        "plain_kernels": "record.taping",
        "NoRule": "secant.call",
        "Closure": "secant.segment",
        "Segment": "secant.segment",
    }

    def __getattr__(name: str) -> object:
        if name not in FILES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        return getattr(import_module(f"{__name__}.{FILES[name]}"), name)
