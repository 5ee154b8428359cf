"""A callback that follows a training of Lightning; its `trace` is that of `ntkexp.follow`.

seen = ntkexp.lightning.Follow(queries=x_query)
lightning.Trainer(callbacks=[seen]).fit(module, loader)
seen.trace.attribute()
"""

from __future__ import annotations

from typing import Any

from ntkexp.foreign_loop.arguments import common_submodule
from ntkexp.foreign_loop.follow import FollowSession
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import load_torchvision

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
        self.model, self.session = model, FollowSession(**options)

    @property
    def trace(self) -> Trace:
        """What was seen, up to now or to the end."""
        return self.session.trace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (
            not self.model and type(pl_module).forward is LightningModule.forward
        ):  # which says that there is none
            moved = {
                id(w)
                for each in trainer.optimizers
                for group in each.param_groups
                for w in group["params"]
            }
            part = common_submodule(
                [name for name, weight in pl_module.named_parameters() if id(weight) in moved]
            )
            likely = f"here model={part!r}" if part else "as model='net'"
            raise Mistake(
                f"{type(pl_module).__name__} has no forward of its own, and so no calls; name the part that "
                f"training_step calls, {likely}"
            )
        self.session.begin(pl_module.get_submodule(self.model), trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.session.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.session.end(exception)
