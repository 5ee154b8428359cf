"""How the weights move: rules of descent, and how each is summed backwards."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.optimizer.adam import Adam as Adam
    from ntkexp.optimizer.adamw import AdamW as AdamW
    from ntkexp.optimizer.adaptive import AbstractAdam as AbstractAdam
    from ntkexp.optimizer.base import AbstractOptimizer as AbstractOptimizer
    from ntkexp.optimizer.batches import AbstractBatched as AbstractBatched
    from ntkexp.optimizer.flow import Flow as Flow
    from ntkexp.optimizer.gd import GD as GD
    from ntkexp.optimizer.momentum import Momentum as Momentum
    from ntkexp.optimizer.nesterov import Nesterov as Nesterov
    from ntkexp.optimizer.plain import AbstractPlain as AbstractPlain
    from ntkexp.optimizer.sgd import SGD as SGD
    from ntkexp.optimizer.stable_step import AbstractStable as AbstractStable
else:
    __getattr__ = classes_of(__name__)
