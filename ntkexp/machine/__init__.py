"""Kernel machines (predictors built from a kernel), and their comparison with the trained
network.

Each module imports only from the modules listed before it: `base`, `machines`,
`ladder`."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.machine.base import AbstractMachine as AbstractMachine
    from ntkexp.machine.ladder import Ladder as Ladder
    from ntkexp.machine.machines import (
        NNGP as NNGP,
        AbstractFrozen as AbstractFrozen,
        AbstractPathSum as AbstractPathSum,
        FixedCoefficients as FixedCoefficients,
        FrozenEnd as FrozenEnd,
        FrozenLimit as FrozenLimit,
        FrozenStart as FrozenStart,
        Gauss as Gauss,
        KernelRegression as KernelRegression,
        Left as Left,
        Linearised as Linearised,
        Nonlinear as Nonlinear,
        RandomIdentity as RandomIdentity,
        RandomRegression as RandomRegression,
        RBFIdentity as RBFIdentity,
        RBFRegression as RBFRegression,
        Secant as Secant,
    )
else:
    __getattr__ = classes_of(__name__)
