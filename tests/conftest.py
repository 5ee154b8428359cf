"""While tests run, the shapes in signatures are checked."""

from __future__ import annotations

from tests.shapes import check_shapes

check_shapes()
