"""The numbers that `follow(log=)` gives of each step are those that the loop itself finds there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.follow import follow
from ntkexp.mistake import Mistake
from tests.foreign_loop.loops import Loop, batches, loop

Numbers = dict[str, float]


def sgd(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def two(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    first, *rest = model.parameters()
    return [torch.optim.Adam([first], lr=0.01), torch.optim.SGD(rest, lr=0.1)]


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.detach().flatten() for tensor in tensors]).norm())


def trained(of: Loop, steps: int) -> list[Numbers]:
    """Each step is on two batches and clipped, with a schedule; what the loop finds of it."""
    found, parameters = list[Numbers](), list(of.model.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in of.optimizers]
    source = batches()
    for _ in range(steps):
        one, other = next(source), next(source)
        of.zero()
        for batch in (one, other):
            of.back(batch, divisor=2)
        with torch.no_grad():
            both = torch.cat([one, other])
            loss = float(nn.functional.cross_entropy(of.model(of.x[both]), of.y[both]))
        nn.utils.clip_grad_norm_(parameters, 0.5)
        gradient = norm([weight.grad for weight in parameters if weight.grad is not None])
        rates = [each.param_groups[0]["lr"] for each in of.optimizers]
        of.step()
        names = ["learning_rate"] if len(rates) == 1 else ["learning_rate.0", "learning_rate.1"]
        found.append(
            {"loss": loss, "examples": len(both), "gradient_norm": gradient, "weight_norm": norm(parameters)}
            | dict(zip(names, rates, strict=True))
        )
        for schedule in schedules:
            schedule.step()
    return found


@pytest.mark.parametrize("optimizers", [sgd, two])
def test_numbers_are_those_of_the_loop(
    optimizers: Callable[[nn.Sequential], list[torch.optim.Optimizer]], tmp_path: Path
) -> None:
    of, logged = loop(optimizers), list[tuple[Numbers, int]]()
    labels = {str(row): int(label) for row, label in enumerate(of.y)}

    def ids(call: SeenCall) -> Tensor:
        (x,) = call.args
        assert isinstance(x, Tensor)
        return torch.cdist(x, of.x).argmin(1)

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return nn.functional.cross_entropy(outputs, torch.tensor([labels[name] for name in call.ids]), reduction="none")

    def log(numbers: Numbers, step: int) -> None:
        logged.append((numbers, step))

    found = list[Numbers]()
    # the second part goes on with the trace of the first, and so do its steps
    for steps in (4, 2):
        with follow(of.model, of.optimizers, queries=of.queries, ids=ids, loss=loss, to=tmp_path / "run", log=log):
            found += trained(of, steps)
    assert [step for _, step in logged] == list(range(6))
    for (numbers, _), expected in zip(logged, found, strict=True):
        assert 0 <= numbers.pop("rule_error") < 1e-14
        assert numbers == pytest.approx(expected, rel=1e-12)


def test_a_log_is_a_function() -> None:
    of = loop(sgd)
    with (
        pytest.raises(Mistake, match="log= is a str; give a function of numbers and step"),
        follow(of.model, of.optimizers, queries=of.queries, log="wandb"),  # type: ignore[arg-type]
    ):
        pass
