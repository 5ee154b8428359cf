"""Modes in which torch hands over its operations one by one."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode that torch does not shield from its compiler, which is never on here and takes a second to load."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
