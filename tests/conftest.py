"""While tests run, shapes in signatures are checked, and a process takes one thread: tests run on all cores at once."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported here, and in every process that a test starts

from tests.shapes import check_shapes

check_shapes()
