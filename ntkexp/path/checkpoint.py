"""What a checkpoint holds of what is accumulated along a path, and how a run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ntkexp.on_disk import copy_rows


class Resumable:
    """Something that goes on from a checkpoint: `checkpointed` names its fields that a checkpoint
    holds."""

    checkpointed: ClassVar[tuple[str, ...]] = ()

    @property
    def state(self) -> dict[str, Any]:
        """These fields, as plain data and tensors."""
        return {name: state_of(getattr(self, name)) for name in self.checkpointed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the checkpoint stood. Tensors stay where they lie, in memory or on disk, and
        take its numbers."""
        for name in self.checkpointed:
            own = getattr(self, name)
            if own is None:  # also of checkpoints from before there was such a field
                continue
            kept = state[name]
            if isinstance(own, Tensor):
                copy_rows(own, kept)
            elif isinstance(own, Resumable):
                own.restore(kept)
            elif isinstance(own, Mapping):
                for key, part in own.items():
                    part.restore(kept[key])
            else:
                setattr(self, name, type(own)(kept))


def state_of(value: Any) -> Any:
    """A field as plain data and tensors."""
    if isinstance(value, Resumable):
        return value.state
    return {key: part.state for key, part in value.items()} if isinstance(value, Mapping) else value
