"""The path of the weights: its steps, the sums along it, and its settings.

Each line imports only from the lines above it:

rule, checkpoint, components            rules that read a step; checkpoints of sums; groups of parameters
settings                                the rules, the sums, and the steps at which kernels are kept
points                                  the points, and the network at one set of weights
step, step_kernel                       one step of training; its kernel ⟨J̄(x), J(xᵢ)⟩
domain                                  the points, outputs and steps of the sums
integrals, recording                    𝒦 and 𝒮, and their shares; recorded steps, for a backward pass
forward_sum, snapshot_sum               the sum over every step, and from the kernel at a few steps
backward_sum, two_passes                the sum from the last step to the first; its pass over a recorded run
integration, budget                     the choice of a sum; its memory and time
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.path.settings import Kernel as Kernel
    from ntkexp.path.settings import Path as Path
else:
    __getattr__ = classes_of(__name__)
