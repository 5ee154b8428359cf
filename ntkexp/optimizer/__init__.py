"""Optimizers: update rules, and each step as a linear map of gradients.

Each module imports only from the modules listed before it:

    base       the interface, `LinearStep`, mini-batches
    descent    gradient descent, SGD, momentum, RMSprop, Adam and AdamW
    flow       gradient flow
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.optimizer.base import (
        AbstractBatched as AbstractBatched,
        AbstractOptimizer as AbstractOptimizer,
        AbstractPlain as AbstractPlain,
        AbstractStable as AbstractStable,
    )
    from ntkexp.optimizer.descent import (
        GD as GD,
        SGD as SGD,
        AbstractAdam as AbstractAdam,
        AbstractAdaptive as AbstractAdaptive,
        Adam as Adam,
        AdamW as AdamW,
        Momentum as Momentum,
        Nesterov as Nesterov,
        Rmsprop as Rmsprop,
    )
    from ntkexp.optimizer.flow import Flow as Flow
else:
    __getattr__ = classes_of(__name__)
