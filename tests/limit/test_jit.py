"""What numba compiled is kept for the very files that it was compiled from."""

from __future__ import annotations

from pathlib import Path

from ntkexp.limit.fused.functions import source_digest


def test_a_change_of_any_file_is_another_place(tmp_path: Path) -> None:
    """Numba itself looks at the file of a function alone, and would go on calling what others were."""
    digests = set()
    for change in ("one", "two"):
        folder = tmp_path / change
        folder.mkdir()
        (folder / "caller.py").write_text("from called import called\n")
        (folder / "called.py").write_text(f"called = '{change}'\n")
        digests.add(source_digest(folder))
    assert len(digests) == 2
