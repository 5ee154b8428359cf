"""Processes that train together, each with a part of every batch: which of them this is, and what the first one says.

What the first decides, the others hear of by the store through which `torch.distributed` found them; that no collective
is needed for it keeps a process that does not follow from stopping those that do.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from torch.distributed import get_rank, get_world_size, is_available, is_initialized
from torch.distributed.distributed_c10d import Store, _get_default_store  # there is no public way to the store

from ntkexp.mistake import Mistake

Decision: TypeAlias = dict[str, int]
PATIENCE = 300.0  # seconds: the first may have a long trace to read before it goes on with it
ASKED: Counter[str] = Counter()
"""How often this process was part of what is decided about something."""


@dataclass(frozen=True)
class Together:
    """The process of this `rank`, one of `world`."""

    rank: int = 0
    world: int = 1
    store: Store | None = None

    def decided(self, about: str, decide: Callable[[], Decision]) -> Decision:
        """What the first process decides; what is refused there, is refused in all.

        >>> Together().decided("a walk", lambda: {"miles": 3})
        {'miles': 3}
        """
        if self.store is None:
            return decide()
        asked = f"{about} in {self.rank}"
        key, ASKED[asked] = f"ntkexp/{ASKED[asked]}/{about}", ASKED[asked] + 1
        return self.heard(about, key, self.store) if self.rank else said(decide, key, self.store)

    def heard(self, about: str, key: str, store: Store) -> Decision:
        """What the first process has said."""
        try:
            store.wait([key], timedelta(seconds=PATIENCE))
            found = json.loads(store.get(key))
        except RuntimeError as error:
            raise Mistake(
                f"rank {self.rank} follows into {about}, and rank 0 did not within {PATIENCE:g} s; call ntkexp.follow "
                "in every process, with the same to="
            ) from error
        if "refused" in found:
            raise Mistake(f"rank 0: {found['refused']}")
        return Decision(found["said"])


def said(decide: Callable[[], Decision], key: str, store: Store) -> Decision:
    """Decide, and say so."""
    try:
        found = decide()
    except Mistake as error:
        store.set(key, json.dumps({"refused": str(error)}))
        raise
    store.set(key, json.dumps({"said": found}))
    return found


def together() -> Together:
    """Those among which this process is."""
    if not (is_available() and is_initialized()) or get_world_size() == 1:
        return Together()
    return Together(get_rank(), get_world_size(), _get_default_store())
