"""Modules whose values decide which row goes where, trained by a run: exact, and the same in blocks of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ntkexp.run.setting import survey
from tests.kernel.compare import agree
from tests.run.small import Ran, ran, small
from tests.run.test_exactness import assert_exact

ROUNDING = 1e-12  # sums of products in another order, through six steps
FEW = (
    *("data.train=12", "data.probe=6", "data.test=6", "steps=6", "path.count=2", "path.rule=[secant]"),
    *("ladder.machine=[secant]", "model=module"),
)
ROWS = """
    class build(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, outputs)

        def forward(self, x):
            x = x[:, 0]
            return self.outer(self.summed(x, x.mean(2) > 0.3))
    """

NETS = {
    "sorted rows": f"""{ROWS}
        def summed(self, x, mask):
            order = x.sum((1, 2)).argsort()
            return torch.tanh(self.inner(x[order])).sum(1)[order.argsort()]
    """,
    "packed padding": f"""{ROWS}
        def summed(self, x, mask):
            room = x.new_zeros(*x.shape[:2], 4)
            room[mask] = torch.tanh(self.inner(x[mask]))
            return room.sum(1)
    """,
    "lengths read by Python": f"""{ROWS}
        def summed(self, x, mask):
            parts = torch.tanh(self.inner(x[mask])).split(mask.sum(1).tolist())
            return torch.stack([part.sum(0) for part in parts])
    """,
    "the last position that counts": f"""{ROWS}
        def summed(self, x, mask):
            return torch.tanh(self.inner(x))[torch.arange(len(x)), (mask.sum(1) - 1).clamp(min=0)]
    """,
    "experts": """
    class build(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.router, self.experts = nn.Linear(64, 3), nn.ModuleList(nn.Linear(64, outputs) for _ in range(3))

        def forward(self, x):
            x = x.flatten(1)
            chosen, mixed = self.router(x).argmax(1), x.new_zeros(len(x), self.experts[0].out_features)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                mixed = mixed.index_add(0, rows, torch.tanh(expert(x[rows])))
            return mixed
    """,
}


def in_blocks(file: Path, block: int | None) -> Ran:
    """The run with memory for blocks of so many points, or of all."""
    model = (*FEW, f"model.path={file}:build")
    if block is None:
        return ran(*model, trust=[str(file)])
    budget = survey(small(*model, trust=[str(file)])).budget
    memory = (budget.fixed + (2 * block + 1) * budget.per_point) / 1e9
    found = ran(*model, f"memory_gb={memory:.12f}", trust=[str(file)])
    assert found.setting.points.block == block
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sorted rows" else pytest.mark.slow) for name in NETS]
)
def test_a_run_is_exact_whatever_the_block(name: str, written: Callable[[str], Path]) -> None:
    file = written(NETS[name])
    whole, cut = in_blocks(file, None), in_blocks(file, 7)
    for run in (whole, cut):
        assert_exact(run)
    agree(cut.outcome.evidence.kernel_end, whole.outcome.evidence.kernel_end, ROUNDING)
    agree(cut.contributions("secant"), whole.contributions("secant"), ROUNDING)
