"""Diagnostics: quantities of the network that are measured during training,
at chosen steps.

Each module imports only from the modules listed before it:

    base       the interface, and the state of training that diagnostics receive
    kernels    diagnostics of the tangent kernel
    loss       diagnostics of the loss: the norm of its gradient, and its sharpness
    expansion  the error of Taylor expansions of the network
    momentum   the momentum of a step, as a velocity of the outputs
    function   a function in a user's file
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.diagnostics.base import AbstractDiagnostic as AbstractDiagnostic
    from ntkexp.diagnostics.expansion import Taylor as Taylor
    from ntkexp.diagnostics.function import UserFunction as UserFunction
    from ntkexp.diagnostics.kernels import (
        Eigenfunctions as Eigenfunctions,
        KernelVelocity as KernelVelocity,
        LayerAlignment as LayerAlignment,
        LayerKernels as LayerKernels,
    )
    from ntkexp.diagnostics.loss import (
        GradientNorm as GradientNorm,
        Sharpness as Sharpness,
    )
    from ntkexp.diagnostics.momentum import FunctionMomentum as FunctionMomentum
else:
    __getattr__ = classes_of(__name__)
