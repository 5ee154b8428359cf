"""A run whose gradient cancels: balanced labels at outputs of zero leave the last bias nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.run.small import ran

QUICK = (
    "model.width=8", "steps=12", "loss=squared", "init.centred=true", "path.rule=[secant]", "ladder.machine=[secant]",
    "data=table", "data.target=label", "data.train=12", "data.query=6", "data.test=null",
)  # fmt: skip


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Path:
    """A table with as many examples of one class as of the other."""
    random = np.random.default_rng(0)
    rows = [f"{a},{b},{'yes' if k % 2 else 'no'}" for k, (a, b) in enumerate(random.normal(size=(24, 2)))]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["a,b,label", *rows]) + "\n")
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_parts_stay_as_small_as_what_training_did(table: Path, optimizer: str) -> None:
    """Some of the seeds draw balanced labels. A step in which the bias counted would leave parts of 10⁸ · 0.01."""
    settings = (f"data.path={table}", f"optimizer={optimizer}", "optimizer.eps=1e-8")
    for seed in range(6):
        run = ran(*QUICK, *settings, f"seed={seed}")
        parts = run.contributions("secant")
        assert parts.abs().max() < 100 * run.change.abs().max()
        assert all(row.relative_error is not None and row.relative_error < 1e-12 for row in run.rows("secant"))
