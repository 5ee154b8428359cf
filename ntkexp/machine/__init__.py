"""What the network is compared with: kernel machines, and the ladder of them."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.machine.base import AbstractMachine as AbstractMachine
    from ntkexp.machine.fixed_coefficients import FixedCoefficients as FixedCoefficients
    from ntkexp.machine.frozen import AbstractFrozen as AbstractFrozen
    from ntkexp.machine.frozen import FrozenEnd as FrozenEnd
    from ntkexp.machine.frozen import FrozenLimit as FrozenLimit
    from ntkexp.machine.frozen import FrozenStart as FrozenStart
    from ntkexp.machine.kernel_regression import KernelRegression as KernelRegression
    from ntkexp.machine.ladder import Ladder as Ladder
    from ntkexp.machine.linearised import Linearised as Linearised
    from ntkexp.machine.nngp import NNGP as NNGP
    from ntkexp.machine.path_sum import AbstractPathSum as AbstractPathSum
    from ntkexp.machine.path_sum import Gauss as Gauss
    from ntkexp.machine.path_sum import Left as Left
    from ntkexp.machine.path_sum import Secant as Secant
    from ntkexp.machine.random_psd import RandomIdentity as RandomIdentity
    from ntkexp.machine.random_psd import RandomRegression as RandomRegression
    from ntkexp.machine.rbf import RBFIdentity as RBFIdentity
    from ntkexp.machine.rbf import RBFRegression as RBFRegression
else:
    __getattr__ = classes_of(__name__)
