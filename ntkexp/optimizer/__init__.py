"""Optimizers: update rules, and each step as a linear map of gradients.

Each module imports only from the modules listed before it:

    base       the interface, `LinearStep`, mini-batches
    descent    gradient descent, SGD, momentum, RMSprop, Adam and AdamW
    flow       gradient flow
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.optimizer.base import AbstractBatched as AbstractBatched
    from ntkexp.optimizer.base import AbstractOptimizer as AbstractOptimizer
    from ntkexp.optimizer.base import AbstractPlain as AbstractPlain
    from ntkexp.optimizer.base import AbstractStable as AbstractStable
    from ntkexp.optimizer.descent import GD as GD
    from ntkexp.optimizer.descent import SGD as SGD
    from ntkexp.optimizer.descent import AbstractAdam as AbstractAdam
    from ntkexp.optimizer.descent import AbstractAdaptive as AbstractAdaptive
    from ntkexp.optimizer.descent import Adam as Adam
    from ntkexp.optimizer.descent import AdamW as AdamW
    from ntkexp.optimizer.descent import Momentum as Momentum
    from ntkexp.optimizer.descent import Nesterov as Nesterov
    from ntkexp.optimizer.descent import Rmsprop as Rmsprop
    from ntkexp.optimizer.flow import Flow as Flow
else:
    __getattr__ = classes_of(__name__)
