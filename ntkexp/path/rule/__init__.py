"""Quadrature rules for the mean Jacobian along one finite training step."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.path.rule.base import AbstractRule as AbstractRule
    from ntkexp.path.rule.base import Gauss as Gauss
    from ntkexp.path.rule.base import Left as Left
    from ntkexp.path.rule.base import Secant as Secant
else:
    __getattr__ = classes_of(__name__)
