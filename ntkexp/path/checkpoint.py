"""Save and restore the sums along a path, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ntkexp.on_disk import copy_rows


class Resumable:
    """An object that can be saved to a checkpoint and restored from it. `checkpointed`
    names the fields that are saved."""

    checkpointed: ClassVar[tuple[str, ...]] = ()

    @property
    def state(self) -> dict[str, Any]:
        """The fields named in `checkpointed`, as plain data and tensors."""
        return {name: state_of(getattr(self, name)) for name in self.checkpointed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the fields. Copy saved tensors into the existing tensors, which are
        in memory or on disk."""
        for name in self.checkpointed:
            value = getattr(self, name)
            if value is None:  # this object does not use the field
                continue
            saved = state[name]
            if isinstance(value, Tensor):
                copy_rows(value, saved)
            elif isinstance(value, Resumable):
                value.restore(saved)
            elif isinstance(value, Mapping):
                for key, part in value.items():
                    part.restore(saved[key])
            else:
                setattr(self, name, type(value)(saved))


def state_of(value: Any) -> Any:
    """Return the value of a field as plain data and tensors."""
    if isinstance(value, Resumable):
        return value.state
    if isinstance(value, Mapping):
        return {key: part.state for key, part in value.items()}
    return value
