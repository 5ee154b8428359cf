"""Quadrature rules for the mean Jacobian along one finite training step."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.path.rule.base import (
        AbstractRule as AbstractRule,
        Gauss as Gauss,
        Left as Left,
        Secant as Secant,
    )
else:
    __getattr__ = classes_of(__name__)
