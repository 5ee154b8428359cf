"""Kernel machines, and their comparison with the trained network.

Each module imports only from the modules listed before it: `base`, `machines`,
`ladder`."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.machine.base import AbstractMachine as AbstractMachine
    from ntkexp.machine.ladder import Ladder as Ladder
    from ntkexp.machine.machines import NNGP as NNGP
    from ntkexp.machine.machines import AbstractFrozen as AbstractFrozen
    from ntkexp.machine.machines import AbstractPathSum as AbstractPathSum
    from ntkexp.machine.machines import FixedCoefficients as FixedCoefficients
    from ntkexp.machine.machines import FrozenEnd as FrozenEnd
    from ntkexp.machine.machines import FrozenLimit as FrozenLimit
    from ntkexp.machine.machines import FrozenStart as FrozenStart
    from ntkexp.machine.machines import Gauss as Gauss
    from ntkexp.machine.machines import KernelRegression as KernelRegression
    from ntkexp.machine.machines import Left as Left
    from ntkexp.machine.machines import Linearised as Linearised
    from ntkexp.machine.machines import Nonlinear as Nonlinear
    from ntkexp.machine.machines import RandomIdentity as RandomIdentity
    from ntkexp.machine.machines import RandomRegression as RandomRegression
    from ntkexp.machine.machines import RBFIdentity as RBFIdentity
    from ntkexp.machine.machines import RBFRegression as RBFRegression
    from ntkexp.machine.machines import Secant as Secant
else:
    __getattr__ = classes_of(__name__)
