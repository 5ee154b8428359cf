"""Parts of another author: each one file and one YAML, in a folder outside the package."""

from __future__ import annotations

import pytest

from tests.extension.outside import Outside, written

collect_ignore = ["parts"]  # they are imported from where they are copied to, and from nowhere else


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    return written(tmp_path_factory.mktemp("outside"))
