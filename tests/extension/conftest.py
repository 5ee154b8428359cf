"""Components of another author: a Python file and a YAML file each, in a folder outside the package."""

from __future__ import annotations

import pytest

from tests.extension.outside import Outside, written

collect_ignore = ["parts"]  # tests import copies of these files


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    return written(tmp_path_factory.mktemp("outside"))
