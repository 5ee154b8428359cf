"""What training makes small: losses of one example."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.loss.base import AbstractLoss as AbstractLoss
    from ntkexp.loss.base import CrossEntropy as CrossEntropy
    from ntkexp.loss.base import Hinge as Hinge
    from ntkexp.loss.base import Logistic as Logistic
    from ntkexp.loss.base import Squared as Squared
else:
    __getattr__ = classes_of(__name__)
