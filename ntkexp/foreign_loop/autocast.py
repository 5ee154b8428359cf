"""Autocast: the context in which a call was made whose products are formed in shorter numbers than weights have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Casts on a kind of device to numbers of a `kind`, each weight's once in the context or at every use; of the
    `whole` model, or of a part that enters autocast by itself."""

    device: str
    kind: str
    cached: bool
    whole: bool = True

    @classmethod
    def now(cls, device: str, *, whole: bool = True) -> Autocast | None:
        """The one that we are in.

        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     Autocast.now("cpu")
        Autocast(device='cpu', kind='bfloat16', cached=True, whole=True)
        """
        if not torch.is_autocast_enabled(device):
            return None
        kind = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return cls(device, kind, torch.is_autocast_cache_enabled(), whole)

    @property
    def dtype(self) -> torch.dtype:
        """The numbers that are cast to."""
        found: torch.dtype = getattr(torch, self.kind)
        return found

    @property
    def eps(self) -> float:
        """Their precision."""
        return torch.finfo(self.dtype).eps

    @contextmanager
    def again(self) -> Iterator[None]:
        """Be in such a context, unless the model enters it by itself."""
        with torch.autocast(self.device, self.dtype, cache_enabled=self.cached) if self.whole else nullcontext():
            yield
