"""Training in stages with an optimizer each, in one trace or in a new one. Both explain the whole change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall, digests
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake

ROUNDING = 1e-12  # of sums of 8 examples over 8 steps, relative to the largest contribution
STEPS = 4  # of each stage
PARTS = ("contribution", "decay", "rounding")

with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    X = torch.randn(8, 3, dtype=torch.float64)
    Y = torch.randn(8, 1, dtype=torch.float64)
    QUERIES = torch.randn(2, 3, dtype=torch.float64)

TARGETS = dict(zip(digests(X), Y, strict=True))

Make: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, 0.02, weight_decay=0.1)


def heavy(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.05, momentum=0.9)


def plain(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.1)


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, weigh: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Train on most examples. Each stage leaves others out."""
    for step in range(STEPS):
        batch = (torch.arange(5) + 3 * stage).roll(step)[:4]
        optimizer.zero_grad()
        losses = (model(X[batch]) - Y[batch]).square().mean(1)
        (losses if weigh is None else losses * weigh(batch)).mean().backward()
        optimizer.step()


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(QUERIES)
    return result


def added(stages: Sequence[xr.Dataset]) -> xr.Dataset:
    """The sum over stages. An example that a stage does not use contributes nothing there."""
    whole = [stage[list(PARTS)] for stage in stages]
    return xr.concat(whole, "stage", join="outer", fill_value=0.0).sum("stage")


def in_two_traces(first: Make, second: Make, *, frozen: bool = False) -> tuple[xr.Dataset, Tensor]:
    """Follow each stage, and add. The second stage may train the last layer alone."""
    model = network()
    before, optimizer = outputs(model), first(model.parameters())
    with ntkexp.follow(model, optimizer, queries=QUERIES) as one:
        train(model, optimizer, 0)
    model[0].requires_grad_(not frozen)
    optimizer = second((model[2] if frozen else model).parameters())
    with ntkexp.follow(model, optimizer, queries=QUERIES) as two:
        train(model, optimizer, 1)
    found = [trace.attribute(quiet=True) for trace in (one, two)]
    return added(found), outputs(model) - before


def in_one_trace(first: Make, second: Make) -> xr.Dataset:
    """Follow both optimizers from the beginning."""
    model = network()
    optimizers = [make(model.parameters()) for make in (first, second)]
    with ntkexp.follow(model, optimizers, queries=QUERIES) as trace:
        for stage, optimizer in enumerate(optimizers):
            train(model, optimizer, stage)
    return trace.attribute(quiet=True)


def in_one_folder(make: Make, folder: Path, loss: Callable[[Tensor, SeenCall], Tensor] | None = None) -> Trace:
    """Continue the trace in the folder, with a new optimizer of the same kind."""
    model = network()
    for stage in range(2):
        optimizer = make(model.parameters())
        with ntkexp.follow(model, optimizer, queries=QUERIES, to=folder, loss=loss) as trace:
            train(model, optimizer, stage)
    return trace


def assert_same(found: xr.Dataset, expected: xr.Dataset) -> None:
    size = float(abs(expected["contribution"]).max())
    for part in PARTS:
        assert float(abs(found[part] - expected[part]).max()) <= ROUNDING * size, part
    assert found.sizes["example"] == expected.sizes["example"]


CHANGES = [(adam, heavy), (heavy, adam), (adam, adam), (plain, adam), (adam, plain)]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_stages_add_up_and_one_trace_agrees(first: Make, second: Make) -> None:
    found, change = in_two_traces(first, second)
    total = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    size = float(abs(found["contribution"]).max())
    assert abs(total.to_numpy() - change.numpy()).max() <= ROUNDING * size
    assert_same(in_one_trace(first, second), found)


def test_a_stage_may_train_fewer_layers() -> None:
    found, change = in_two_traces(adam, adam, frozen=True)
    total = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    assert abs(total.to_numpy() - change.numpy()).max() <= ROUNDING * float(abs(found["contribution"]).max())


@pytest.mark.parametrize("make", [adam, heavy, plain])
@pytest.mark.sample(1)
def test_a_folder_continues_with_a_new_optimizer_of_its_kind(make: Make, tmp_path: Path) -> None:
    trace = in_one_folder(make, tmp_path / "run")
    assert len(trace.steps) == 2 * STEPS
    assert_same(trace.attribute(quiet=True), in_two_traces(make, make)[0])


@pytest.mark.parametrize("again", [0, 1])
def test_a_trace_of_both_optimizers_resumes_between_stages_and_within(again: int, tmp_path: Path) -> None:
    """The first stage is over when the loop stops, or the second stage has begun."""
    model = network()
    optimizers = [make(model.parameters()) for make in (adam, heavy)]
    for stages in ([0], [1]) if again == 0 else ([0, 1], [1]):
        with ntkexp.follow(model, optimizers, queries=QUERIES, to=tmp_path / "run") as trace:
            for stage in stages:
                train(model, optimizers[stage], stage)
    found = trace.attribute(quiet=True)
    assert len(trace.steps) == (2 + again) * STEPS
    if not again:
        assert_same(found, in_one_trace(adam, heavy))


def per_example(found: Tensor, call: SeenCall) -> Tensor:
    return (found - torch.stack([TARGETS[name] for name in call.ids])).square().mean(1)


def test_effects_know_that_a_new_adam_begins_without_memory(tmp_path: Path) -> None:
    """The derivative by the weight of an example, against a difference of two trainings."""
    trace = in_one_folder(adam, tmp_path / "run", per_example)
    found = trace.attribute(effects="derivative", mean="fixed", quiet=True)["effect"]
    example, width = 3, 1e-5
    ends = []
    for sign in (1, -1):

        def weigh(batch: Tensor, sign: int = sign) -> Tensor:
            return 1 + sign * width * (batch == example).double()

        model = network()
        for stage in range(2):
            train(model, adam(model.parameters()), stage, weigh)
        ends.append(outputs(model))
    slope = (ends[0] - ends[1]) / (2 * width)
    predicted = -found.sel(example=digests(X)[example]).to_numpy()  # without the example, its weight falls
    assert abs(predicted - slope.numpy()).max() <= 1e-6 * float(slope.abs().max())


def take_turns(*makes: Make) -> None:
    model = network()
    optimizers = [make(model.parameters()) for make in makes]
    with ntkexp.follow(model, optimizers, queries=QUERIES):
        for stage, optimizer in enumerate([*optimizers, *optimizers]):
            train(model, optimizer, stage % 2)


def twice(first: Make, second: Make, folder: Path | None = None) -> None:
    """Follow two stages, with two optimizers or one."""
    model = network()
    optimizer = first(model.parameters())
    with ntkexp.follow(model, optimizer, queries=QUERIES, to=folder):
        train(model, optimizer, 0)
    optimizer = optimizer if second is first else second(model.parameters())
    with ntkexp.follow(model, optimizer, queries=QUERIES, to=folder):
        train(model, optimizer, 1)


def unannounced() -> None:
    model = network()
    optimizer = adam(model.parameters())
    with ntkexp.follow(model, optimizer, queries=QUERIES):
        train(model, optimizer, 0)
        train(model, heavy(model.parameters()), 1)


def effects_of_both() -> None:
    model = network()
    optimizers = [make(model.parameters()) for make in (adam, heavy)]
    with ntkexp.follow(model, optimizers, queries=QUERIES, loss=per_example) as trace:
        for stage, optimizer in enumerate(optimizers):
            train(model, optimizer, stage)
    trace.attribute(effects=True, quiet=True)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "turns": (
        lambda _: take_turns(adam, heavy),
        "step 8: another optimizer has updated '0.weight' since the last step of AdamW",
    ),
    "turns with a plain one": (lambda _: take_turns(heavy, plain), "let one stage end before the next begins"),
    "one optimizer, followed twice": (
        lambda _: twice(heavy, heavy),
        "has taken steps already.*begin with a new optimizer, or continue .* with its to=",
    ),
    "a folder of another optimizer": (
        lambda folder: twice(adam, heavy, folder / "run"),
        r"\['AdamW'\] and not \['SGD'\]; give another folder to begin anew, or .*follow\(model, \[first, second\]\)",
    ),
    "a new optimizer inside": (
        lambda _: unannounced(),
        r"step 4: .*another optimizer \(SGD\).*follow\(model, \[first, second\]\).*, or .*begin again",
    ),
    "effects of both": (lambda _: effects_of_both(), "effects need one optimizer for each parameter.*each stage alone"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_both_ways(case: str, tmp_path: Path) -> None:
    act, words = REFUSED[case]
    with pytest.raises(Mistake, match=words):
        act(tmp_path)


def test_plain_optimizers_may_take_turns() -> None:
    take_turns(plain, plain)
