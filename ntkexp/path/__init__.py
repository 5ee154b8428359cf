"""The path of the weights: its steps, the sums along it, and its settings."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.path.settings import Kernel as Kernel
    from ntkexp.path.settings import Path as Path
else:
    __getattr__ = classes_of(__name__)
