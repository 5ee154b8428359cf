"""What trials read at many widths: a network that differs by its width alone."""

from __future__ import annotations

import torch

from ntkexp.init.base import AbstractInit
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.output import ScaledOutput


def network_of_width(
    width: int, model: AbstractArchitecture, init: AbstractInit, task: LearningTask, generator: torch.Generator
) -> ScaledOutput:
    """Draw what a model is at this width, before training.

    >>> from ntkexp.init.ntk import NTK
    >>> from ntkexp.model.mlp import MLP
    >>> asked = MLP(depth=1), NTK(W_std=1.0, b_std=0.0), LearningTask((3,), 1), torch.Generator()
    >>> [sum(weight.numel() for weight in network_of_width(width, *asked).parameters()) for width in (2, 8)]
    [8, 32]
    """
    wide = model.model_copy(update={"width": width})
    return wide.module(init, task.shape, task.outputs, generator, task.vocabulary).eval()
