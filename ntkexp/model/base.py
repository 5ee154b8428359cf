"""An architecture: a value from which a network of any width is built, for inputs of any shape."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from ntkexp.component import Component, Count
from ntkexp.init.base import AbstractInit
from ntkexp.layer.base import AbstractLayer, build
from ntkexp.limit.network import Network, network
from ntkexp.mistake import Mistake
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.output import ScaledOutput, read


class AbstractArchitecture(Component):
    """An architecture is what is trained. `width` scales every architecture."""

    remedy: ClassVar[str] = "lower init.W_std or init.alpha"  # for outputs that are not finite

    width: Count = 512

    @abstractmethod
    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        """A network for the task, its weights drawn from the generator."""

    def module(
        self,
        init: AbstractInit,
        shape: tuple[int, ...],
        outputs: int,
        generator: torch.Generator,
        vocabulary: int = 0,
    ) -> ScaledOutput:
        """The network at the start of training, its output read as `init` says; `shape` is that of one example, and
        a `vocabulary` that is not 0 says that examples are tokens.
        """
        return read(self.network(init, LearningTask(shape, outputs, vocabulary), generator), init)

    def limit(self, init: AbstractInit, task: LearningTask) -> Network:
        """What the network h becomes as its width grows; where that is not known, a mistake says so."""
        raise Mistake(f"model={self.option} has no known limit of infinite width")


class AbstractLayered(AbstractArchitecture):
    """An architecture that is a list of layers."""

    @abstractmethod
    def layers(self, init: AbstractInit, shape: tuple[int, ...], outputs: int) -> tuple[AbstractLayer, ...]:
        """The layers, from an example of the given shape to its outputs."""

    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        task.refuse_tokens(self.option)
        return build(self.layers(init, task.shape, task.outputs), task.shape, generator)

    def limit(self, init: AbstractInit, task: LearningTask) -> Network:
        task.refuse_tokens(self.option)
        return network(self.layers(init, task.shape, task.outputs), task.shape)
