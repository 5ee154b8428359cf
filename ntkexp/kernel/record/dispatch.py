"""Modes in which torch hands over its operations one by one."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode without torch's shield against its own compiler, which is never on here and takes a second to load."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    def __init_subclass__(cls) -> None:
        """Nothing: torch's would put up the shield."""
