"""A training of Lightning is followed by a callback, whose `trace` is that of `ntkexp.follow`.

seen = ntkexp.lightning.Follow(queries=x_query)
lightning.Trainer(callbacks=[seen]).fit(module, loader)
seen.trace.attribute()
"""

from __future__ import annotations

from typing import Any

from ntkexp.foreign_loop.held_open import HeldOpen
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.model.foreign.torchvision_import import load_torchvision

try:
    load_torchvision()
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise Mistake(
        f"ntkexp.lightning needs lightning, which cannot be imported ({error}): pip install 'ntkexp[lightning]'"
    ) from error


class Follow(Callback):  # type: ignore[misc]  # another library's class
    """Takes what `ntkexp.follow` takes beside model and optimizer. `model` names the part of the module that the
    training step calls, as in `self.net(x)`; by itself it is the module, called as `self(x)`."""

    def __init__(self, *, model: str = "", **options: Any) -> None:
        self.model, self.watching = model, HeldOpen(**options)

    @property
    def trace(self) -> Trace:
        """What was seen, up to now or to the end."""
        return self.watching.trace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watching.begin(pl_module.get_submodule(self.model), trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watching.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.watching.end(exception)
