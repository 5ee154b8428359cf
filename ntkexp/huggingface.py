"""A callback for Hugging Face's Trainer that follows the training,
like `ntkexp.follow`.

follow = ntkexp.huggingface.Follow(queries=tokens, output="logits")
transformers.Trainer(model, arguments, train_dataset=data, callbacks=[follow]).train()
follow.trace.attribute()
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ntkexp.foreign_loop.follow import FollowSession
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import load_torchvision

try:
    load_torchvision()
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise Mistake(
        f"ntkexp.huggingface needs transformers, which cannot be imported ({error}): pip install "
        "'ntkexp[huggingface]'"
    ) from error


class Follow(TrainerCallback):  # type: ignore[misc]  # another library's class
    """A callback for Trainer with the options of `ntkexp.follow`.
    Its attribute `trace` is the trace.

    Args:
        **options: The arguments of `ntkexp.follow`, except `model` and `optimizer`.

    Raises:
        TypeError: if `follow` has no such option.
    """

    def __init__(self, **options: Any) -> None:
        self.session = FollowSession(**options)

    @property
    def trace(self) -> Trace:
        """The trace, as from `ntkexp.follow`.
        It is available during and after training."""
        return self.session.trace

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **others: object,
    ) -> None:
        self.session.begin(model, [optimizer])

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: object,
    ) -> None:
        self.session.end()
