"""A callback for Lightning's Trainer that follows the training, like `ntkexp.follow`.

follow = ntkexp.lightning.Follow(queries=x_query)
lightning.Trainer(callbacks=[follow]).fit(module, loader)
follow.trace.attribute()
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
        f"ntkexp.lightning needs lightning, which cannot be imported ({error}): pip install "
        "'ntkexp[lightning]'"
    ) from error


class Follow(Callback):  # type: ignore[misc]  # another library's class
    """A callback with the options of `ntkexp.follow`.
    Its attribute `trace` is the trace.

    Args:
        model: The name of the submodule that `training_step` calls, such as 'net' for
            `self.net(x)`. By default, follow the Lightning module itself, called as
            `self(x)`.
        **options: The arguments of `ntkexp.follow`, except `model` and `optimizer`.

    Raises:
        TypeError: if `follow` has no such option.
    """

    def __init__(self, *, model: str = "", **options: Any) -> None:
        self.model = model
        self.session = FollowSession(**options)

    @property
    def trace(self) -> Trace:
        """The trace, as from `ntkexp.follow`.
        It is available during and after training."""
        return self.session.trace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.model:
            refuse_without_forward(trainer, pl_module)
        self.session.begin(pl_module.get_submodule(self.model), trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.session.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.session.end(exception)


def refuse_without_forward(trainer: Trainer, module: LightningModule) -> None:
    """Raise if the module has no `forward`. Suggest the submodule
    that the optimizers update."""
    if type(module).forward is not LightningModule.forward:
        return
    moved = set[int]()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            moved |= {id(weight) for weight in group["params"]}
    names = [name for name, weight in module.named_parameters() if id(weight) in moved]
    submodule = common_submodule(names)
    likely = f"here model={submodule!r}" if submodule else "as model='net'"
    raise Mistake(
        f"{type(module).__name__} has no forward of its own, and so no calls; name the part that "
        f"training_step calls, {likely}"
    )
