"""Where training begins: scales of the weights, and of the output."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.init.base import NTK as NTK
    from ntkexp.init.base import AbstractInit as AbstractInit
    from ntkexp.init.base import MeanField as MeanField
    from ntkexp.init.base import Standard as Standard
else:
    __getattr__ = classes_of(__name__)
