"""One thread, as in tests/run."""

from __future__ import annotations

from tests.run.conftest import one_thread

__all__ = ["one_thread"]
