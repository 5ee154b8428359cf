"""The path of the weights: its steps, the sums along it, and its settings.

Each module imports only from the modules listed before it:

rule, checkpoint, components            quadrature rules for a step; checkpoints; groups of parameters
settings                                the user's settings of the path (the keys `path.*`)
points                                  training examples and queries, and the network at some weights
step, step_kernel                       one training step; its kernel ⟨J̄(x), J(xᵢ)⟩
domain                                  the shapes of the sums: points, outputs, examples
integrals, recording                    path kernel 𝒦 and contributions 𝒮; the stored trajectory
forward_sum, snapshot_sum               sums over every step, or over a few kernel snapshots
backward_sum, two_passes                the sum from the last step to the first, for optimizers with momentum
integration, budget                     the choice of a sum; its memory and time
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.path.settings import Kernel as Kernel, Path as Path
else:
    __getattr__ = classes_of(__name__)
