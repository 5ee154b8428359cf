"""The path of the weights: its steps, the sums along it, and its settings.

Each line imports only from the lines above it:

rule, checkpoint, components            how a step is read; what a checkpoint holds; groups of parameters
settings                                what is accumulated, by which rules, and when kernels are kept
points                                  the points, and the network at one set of weights
step, step_kernel                       one step of training; its kernel ⟨J̄(x), J(xᵢ)⟩
domain                                  the points, outputs and steps of the sums
integrals, recording                    𝒦 and 𝒮, and their shares; steps written down for a pass backwards
forward_sum, snapshot_sum               the sum over every step, and from the kernel at a few steps
backward_sum                            the sum from the last step to the first
integration, budget                     which of the sums is used; the memory and time that it takes
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.path.settings import Kernel as Kernel
    from ntkexp.path.settings import Path as Path
else:
    __getattr__ = classes_of(__name__)
