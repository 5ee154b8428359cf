"""Models of images of the library timm, built from their definitions; nothing is downloaded.

    ntkexp train model=timm model.name=vit_tiny_patch16_224 model.width=32

A model is made for the images of the data, and as large as `width`, `depth` and `heads` say, as far as its class has
such settings: `width` is the channels of a ResNet's or ConvNeXt's first stage (each later one doubles them) and of a
transformer's tokens, `depth` the blocks of a transformer without stages. `options` go to the model and win over these;
they are settings of its class, so that none can name a file or an address to read.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, get_type_hints

import torch
from pydantic import Field
from torch import nn

from ntkexp.component import Count, Depth
from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake, nearest
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.foreign.adapted import adapted
from ntkexp.model.foreign.optional_library import Option, library
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.transformer import dividing, fitting


class Timm(AbstractArchitecture):
    """`name` is one of timm's; weights are drawn as the model itself draws them."""

    width: Count = 16
    depth: Depth = 1
    heads: Depth = 4
    name: str = "resnet10t"
    options: dict[str, Option] = Field({})

    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        task.refuse_tokens(self.option)
        if len(task.shape) != 3:
            raise Mistake(f"model=timm takes images, and {task.said}; choose model=mlp")
        make = partial(self.build, library("timm", "timm"), task)
        return adapted(make, task, generator.initial_seed(), f"model.name={self.name}")

    def build(self, timm: Any, task: LearningTask) -> nn.Module:
        """The model, in the sizes that its class knows."""
        if not timm.is_model(self.name):
            hint = nearest(self.name, timm.list_models())
            raise Mistake(f"model.name={self.name}: timm has no such model{hint or '; timm.list_models() lists them'}")
        with torch.device("meta"):  # to look at the class without making the weights of its usual size
            usual = timm.create_model(self.name)
        known = settings(type(usual))
        if strange := [key for key in self.options if key not in known]:
            kind = type(usual).__name__
            raise Mistake(f"model.options: {kind} of timm has no {strange[0]}{nearest(strange[0], known)}")
        sizes = self.sizes(task, set(inspect.signature(type(usual)).parameters))
        model: nn.Module = timm.create_model(
            self.name, num_classes=task.outputs, in_chans=task.shape[0], **(sizes | self.options)
        )
        return model

    def sizes(self, task: LearningTask, known: set[str]) -> dict[str, int | tuple[int, ...]]:
        """The names that the classes of timm have for sizes, of those that this class knows."""
        stages = tuple(self.width * 2**stage for stage in range(4))
        found: dict[str, int | tuple[int, ...]] = {
            "channels": stages,
            "stem_width": max(4, self.width // 2),
            "dims": stages,
            "embed_dim": self.width,
        }
        if "depth" in known:
            found |= {"depth": self.depth, "num_heads": dividing(self.heads, self.width)}
        if "img_size" in known:
            found |= {"img_size": task.shape[1:], "patch_size": fitting(4, task.shape)}
        return {key: value for key, value in found.items() if key in known}


def settings(kind: type[nn.Module]) -> set[str]:
    """What a class of timm can be told: its arguments, those it hands on, and entries of the description it is made of.

    >>> sorted(settings(nn.Flatten))
    ['end_dim', 'start_dim']
    """
    found: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        parameters = list(inspect.signature(each).parameters.values())
        found |= {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
        described = get_type_hints(vars(each).get("__init__", each)).get("cfg")
        found |= {field.name for field in fields(described)} if is_dataclass(described) else set()
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found - {"cfg"}
