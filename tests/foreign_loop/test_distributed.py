"""Processes that train together leave one trace: that of a loop that adds up the gradients of all of them.

Here they take turns in one process, and gradients are averaged by hand; processes of their own are slow.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import clip_grad_norm_

from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.follow import FollowSession, follow
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.store import shards
from ntkexp.foreign_loop.store.shards import Processes
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from tests.foreign_loop import loops, processes
from tests.foreign_loop.loops import EXAMPLES, Loop, Maker, loop
from tests.foreign_loop.processes import WORLD, network

STEPS = 4
CLOSE = 1e-11  # of gradients that are summed in another order, relative to all that was added


@dataclass
class Ranks:
    """Copies of a loop, which train as one; `parts` are the batches of each at every step."""

    optimizers: Maker
    world: int
    clip: float = 1e9
    parts: int = 1
    loops: list[Loop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loops = [loop(self.optimizers) for _ in range(self.world)]

    def batches(self, step: int, rank: int) -> Sequence[Tensor]:
        """Those of a rank; of several sizes, as a last batch is."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randperm(EXAMPLES, generator=generator)[: 3 * self.parts + rank].chunk(self.parts)

    def step(self, index: int, *, averages: bool = True, present: int | None = None) -> None:
        """All take a step, or the first ones, on their averaged gradients."""
        here = self.loops[:present]
        for rank, each in enumerate(here):
            each.zero()
            for batch in self.batches(index, rank):
                each.back(batch, self.parts)
        for weights in zip(*(each.model.parameters() for each in here), strict=True):
            mean = sum(weight.grad for weight in weights) / self.world
            for weight in weights:
                weight.grad = mean.clone() if averages else weight.grad
        for each in here:
            self.finish(each)

    def finish(self, each: Loop) -> None:
        """What follows on the gradients."""
        for group in (group for optimizer in each.optimizers for group in optimizer.param_groups):
            group["lr"] *= 0.9
        clip_grad_norm_(each.model.parameters(), self.clip)
        each.step()

    def alone(self, index: int, one: Loop) -> None:
        """The same step, by one process."""
        one.zero()
        for rank in range(self.world):
            for batch in self.batches(index, rank):
                one.back(batch, self.parts * self.world)
        self.finish(one)


class Follow(ExitStack):
    """Follows each rank as if in a process of its own."""

    def __init__(self, ranks: Ranks, to: Path, **options: Any) -> None:
        super().__init__()
        self.ranks, self.to, self.options, self.store = ranks, to, options, HashStore()

    def __enter__(self) -> Follow:
        self.traces = [self.begin(rank) for rank in range(self.ranks.world)]
        return self

    def begin(self, rank: int, **others: Any) -> Trace:
        given, ours = self.ranks.loops[rank], Processes(rank, self.ranks.world, self.store)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ntkexp.foreign_loop.follow.current_processes", lambda: ours)
            options = {"queries": given.queries, "to": self.to, **self.options, **others}
            return self.enter_context(follow(given.model, given.optimizers, **options))

    def break_off(self) -> None:
        """The training goes no further."""
        self.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


@pytest.fixture
def nothing_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "DECISIONS", type(shards.DECISIONS)())
    monkeypatch.setattr(shards, "PATIENCE", 0.01)


def one_process(ranks: Ranks, steps: int = STEPS, **options: Any) -> Trace:
    one = loop(ranks.optimizers)
    with follow(one.model, one.optimizers, queries=one.queries, **options) as trace:
        for index in range(steps):
            ranks.alone(index, one)
    return trace


def agree(ours: Trace, theirs: Trace, **options: Any) -> None:
    """Both tell the same, to rounding."""
    here, there = (replace(each, folder=None).attribute(**options) for each in (ours, theirs))  # pages take long
    assert here["example"].to_numpy().tolist() == there["example"].to_numpy().tolist()
    for name in {"contribution", "decay", "by_step", "by_component", "change", "effect"} & set(there):
        assert float(abs(here[name] - there[name]).max()) <= CLOSE * float(abs(there["contribution"]).max()), name


def trained(ranks: Ranks, to: Path, **options: Any) -> Trace:
    """All steps of all ranks, followed."""
    with Follow(ranks, to, **options) as seen:
        for index in range(STEPS):
            ranks.step(index)
    return seen.traces[0]


@pytest.mark.usefixtures("nothing_was_asked")
@pytest.mark.parametrize(
    "ranks",
    [Ranks(loops.adamw, 2, clip=0.2, parts=2), pytest.param(Ranks(loops.several, 3), marks=pytest.mark.slow)],
)
def test_ranks_leave_the_trace_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Batches of several sizes, accumulated and clipped, with a schedule; parts and decay add up to the change."""
    trace = trained(ranks, tmp_path / "run", every=3)
    agree(trace, one_process(ranks))
    found = replace(trace, folder=None).attribute()
    missed = found["contribution"].sum("example") + found["decay"] - found["change"]
    assert float(abs(missed).max()) <= CLOSE * float(abs(found["change"]).max())
    if ranks.clip > 1:
        assert found["gradient_factor"].to_numpy() == pytest.approx(1 / ranks.world, rel=1e-10)  # rounding of sums


@pytest.mark.usefixtures("nothing_was_asked")
def test_a_measure_is_explained_through_all_ranks(tmp_path: Path) -> None:
    """And what came by which parameters."""

    def surprise(outputs: Tensor, _: SeenCall) -> Tensor:
        return outputs.logsumexp(1) - outputs[:, 0]

    ranks = Ranks(loops.adamw, 2, clip=0.2)
    before = surprise(ranks.loops[0].model(ranks.loops[0].queries), SeenCall.of(())).detach()
    trace = trained(ranks, tmp_path / "run", measure=surprise)
    agree(trace, one_process(ranks, measure=surprise), by="module")
    found = replace(trace, folder=None).attribute(by="module")
    change = (surprise(ranks.loops[0].model(ranks.loops[0].queries), SeenCall.of(())).detach() - before).numpy()
    missed = found["contribution"].sum("example").to_numpy()[:, 0] + found["decay"].to_numpy()[:, 0] - change
    assert np.abs(missed).max() <= CLOSE * np.abs(change).max()
    assert float(abs(found["by_component"].sum("component") - found["contribution"]).max()) <= CLOSE


@pytest.mark.usefixtures("nothing_was_asked")
@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_effects_are_those_of_one_process(clip: float, tmp_path: Path) -> None:
    """Each rank has a mean of its own, which is renormalised; a third is no scale that a scaler takes back."""
    targets = {tuple(row.tolist()): y for row, y in zip(*both(loop(loops.adamw)), strict=True)}

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        assert isinstance(call.args[0], Tensor)
        labels = torch.stack([targets[tuple(row.tolist())] for row in call.args[0]])
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    ranks = Ranks(loops.adamw, 3, clip=clip)
    agree(trained(ranks, tmp_path / "run", loss=loss), one_process(ranks, loss=loss), effects=True)


@pytest.mark.usefixtures("nothing_was_asked")
@pytest.mark.slow
def test_and_what_leaving_out_changes_is_split_by_a_loop_of_one_process(tmp_path: Path) -> None:
    ranks, y = Ranks(loops.momentum, 3, clip=0.2), loop(loops.momentum).y

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return nn.functional.cross_entropy(outputs, y[[int(name) for name in call.ids]], reduction="none")

    place = {tuple(row.tolist()): k for k, row in enumerate(loop(loops.momentum).x)}
    options: dict[str, Any] = {"loss": loss, "ids": lambda call: [place[tuple(row.tolist())] for row in call.args[0]]}
    trained(ranks, tmp_path / "run", **options)
    files = find_trace(tmp_path / "run")
    found = loop_without(files, lambda: one_process(ranks, **options), "renormalised", [0, 1, 2], [0, 1], Silent())
    assert abs(found.actual).min() > 1e-4
    assert found.closure < CLOSE


def both(given: Loop) -> tuple[Tensor, Tensor]:
    return given.x, given.y


@pytest.mark.usefixtures("nothing_was_asked")
def test_a_rank_that_was_stopped_leaves_the_steps_of_all(tmp_path: Path) -> None:
    """Rank 1 dies after its second step, while rank 0 takes a third."""
    ranks = Ranks(loops.momentum, 2)
    with Follow(ranks, tmp_path / "run", every=1) as seen:
        for index in range(2):
            ranks.step(index)
        ranks.step(2, present=1)
        seen.break_off()
    assert len(seen.traces[0].steps) == 2
    agree(seen.traces[0], one_process(ranks, 2))
    later = load_trace(find_trace(tmp_path / "run"), loop(loops.momentum).model)
    assert len(later.steps) == 2


@pytest.mark.usefixtures("nothing_was_asked")
def test_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    ranks, kept = Ranks(loops.adamw, 2), []
    with Follow(ranks, tmp_path / "run") as seen:
        for index in range(3):
            ranks.step(index)
            kept.append([deepcopy((each.model.state_dict(), each.optimizers[0].state_dict())) for each in ranks.loops])
        seen.break_off()
    again = Ranks(loops.adamw, 2)
    for each, (weights, memory) in zip(again.loops, kept[1], strict=True):
        each.model.load_state_dict(weights)
        each.optimizers[0].load_state_dict(memory)
    with Follow(again, tmp_path / "run") as seen:
        for index in range(2, STEPS):
            again.step(index)
    assert len(seen.traces[0].steps) == STEPS
    agree(seen.traces[0], one_process(ranks))


@pytest.mark.usefixtures("nothing_was_asked")
def test_one_that_ended_before_others_is_refused(tmp_path: Path) -> None:
    ranks = Ranks(loops.sgd, 2)
    with Follow(ranks, tmp_path / "run") as seen:
        ranks.step(0)
        ranks.step(1, present=1)
    with pytest.raises(Mistake, match=r"step 1: rank 1 took no part in it, .* another took 2 steps"):
        seen.traces[0].attribute()


@pytest.mark.usefixtures("nothing_was_asked")
def test_ranks_whose_weights_part_are_refused(tmp_path: Path) -> None:
    """A step was taken on gradients that nobody had averaged."""
    ranks = Ranks(loops.adamw, 2)
    with Follow(ranks, tmp_path / "run") as seen:
        for index in range(3):
            ranks.step(index, averages=index != 1)
    with pytest.raises(Mistake, match=r"step 1: it led rank 1 to weights other than rank 0's: '\d\.\w+' is off by"):
        seen.traces[0].attribute()


@pytest.mark.usefixtures("nothing_was_asked")
def test_a_shard_that_is_missing_is_refused(tmp_path: Path) -> None:
    trace = trained(Ranks(loops.sgd, 2), tmp_path / "run")
    rmtree(tmp_path / "run" / "trace" / "rank-1")
    with pytest.raises(Mistake, match="rank 1 of 2 left no part of its trace"):
        trace.attribute()


@pytest.mark.usefixtures("nothing_was_asked")
def test_a_rank_that_does_not_follow_is_noticed_at_the_first_step(tmp_path: Path) -> None:
    ranks = Ranks(loops.sgd, 2)
    stack = Follow(ranks, tmp_path / "run")
    stack.begin(0)
    with pytest.raises(Mistake, match="rank 1 of 2 does not follow into"):
        ranks.step(0)
    stack.close()


def begun(change: Callable[[Ranks], object], folder: Path, **others: Any) -> None:
    """Both begin to follow, after something has changed; the second otherwise."""
    ranks = Ranks(loops.sgd, 2)
    change(ranks)
    stack = Follow(ranks, folder)
    with ExitStack() as closing:
        closing.callback(stack.close)
        stack.begin(0)
        stack.begin(1, **others)


@pytest.mark.usefixtures("nothing_was_asked")
def test_ranks_begin_at_the_same_weights(tmp_path: Path) -> None:
    with torch.no_grad(), pytest.raises(Mistake, match=r"rank 1 begins at other weights than rank 0 \('4\.bias'"):
        begun(lambda ranks: list(ranks.loops[1].model.parameters())[-1].add_(1), tmp_path / "run")


@pytest.mark.usefixtures("nothing_was_asked")
def test_and_in_the_same_folder(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"rank 1 follows into .*other, and rank 0 did not within"):
        begun(lambda _: None, tmp_path / "run", to=tmp_path / "other")


@pytest.mark.usefixtures("nothing_was_asked")
def test_what_the_first_is_refused_all_are(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    stack = Follow(Ranks(loops.sgd, 2), tmp_path)
    for rank, said in ((0, "holds files that no run wrote"), (1, "rank 0: .* holds files that no run wrote")):
        with pytest.raises(Mistake, match=said):
            stack.begin(rank)


@pytest.mark.usefixtures("nothing_was_asked")
def test_without_a_folder_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"2 processes train together, .* to=…, the same in every process"):
        Follow(Ranks(loops.sgd, 2), tmp_path).begin(0, to=None)


@pytest.mark.usefixtures("nothing_was_asked")
def test_the_first_attributes(tmp_path: Path) -> None:
    ranks = Ranks(loops.sgd, 2)
    with Follow(ranks, tmp_path / "run") as seen:
        ranks.step(0)
    with pytest.raises(Mistake, match=r"rank 1 has written its part .* if rank == 0: trace\.attribute\(\)"):
        seen.traces[1].attribute()


@pytest.mark.usefixtures("nothing_was_asked")
def test_statistics_of_all_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch itself takes them on a GPU only."""
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda _, x: x)
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with follow(model, torch.optim.SGD(model.parameters()), queries=torch.eye(2)):
        model.eval()(torch.eye(2))
        with pytest.raises(Mistake, match=r"step 0: layer '1' \(SyncBatchNorm\) takes its statistics from the batch"):
            model.train()(torch.eye(2))


@pytest.mark.usefixtures("nothing_was_asked")
def test_a_call_around_others_is_none(tmp_path: Path) -> None:
    """Lightning's strategies put the step of training into the model's own forward."""
    given = loop(loops.sgd)
    forward, batch = given.model.forward, torch.arange(4)

    def loss(_: str) -> Tensor:
        given.model.forward = forward  # type: ignore[method-assign]  # as the library does it
        return nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])

    with follow(given.model, given.optimizers, queries=given.queries) as trace:
        for _ in range(2):
            given.zero()
            given.model.forward = loss  # type: ignore[method-assign]  # the same
            given.model("batch").backward()
            given.step()
    found = trace.attribute()
    assert found.sizes["example"] == len(batch)
    assert float(found["gradient_error"].max()) < CLOSE


@pytest.mark.usefixtures("nothing_was_asked")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_what_a_library_broke_off_has_not_come_to_its_end(error: BaseException | None, tmp_path: Path) -> None:
    given = loop(loops.sgd)
    held = FollowSession(queries=given.queries, to=tmp_path / "run")
    held.begin(given.model, given.optimizers)
    loops.plain(given, torch.arange(4))
    held.end(error)
    assert len(held.trace.steps) == 1
    assert find_trace(tmp_path / "run").ended.is_file() == (error is None)


# Processes that train together, as they do it: what they leave is one trace, or says what was wrong.


EXACT = 1e-12  # relative to the change that training made


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes leave."""
    folder = tmp_path_factory.mktemp("played")
    spawn(processes.play, (folder,), nprocs=WORLD)  # type: ignore[no-untyped-call]  # torch's own
    return folder


def trace_of(folder: Path) -> Trace:
    """As another process finds it; no page is made."""
    return replace(load_trace(find_trace(folder), network()), folder=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulated", "plain"])
def test_parts_add_up_to_what_all_of_them_did(name: str, played: Path) -> None:
    found, change = trace_of(played / name).attribute(), torch.load(played / f"{name}.pt").numpy()
    assert abs(found["contribution"].sum("example") + found["decay"] - change).max() <= EXACT * abs(change).max()
    assert found.sizes["step"] == 6
    assert found.sizes["example"] == processes.EXAMPLES
    if name == "plain":
        assert found["gradient_factor"].to_numpy() == pytest.approx(1 / WORLD, rel=1e-10)  # rounding of sums


@pytest.mark.slow
def test_a_process_that_joins_early_is_refused(played: Path) -> None:
    with pytest.raises(Mistake, match=r"step 4: rank 1 took no part in it, .* without join\(\)"):
        trace_of(played / "joined").attribute()


@pytest.mark.slow
def test_gradients_that_were_compressed_are_refused(played: Path) -> None:
    with pytest.raises(Mistake, match=r"step 0: the gradient that was consumed is not that of the 14 examples seen"):
        trace_of(played / "compressed").attribute()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("absent", 0, "rank 1 of 2 does not follow into"),
        ("cut_apart", 1, r"the model is a FSDPSequential, whose weights are cut apart .*\(FSDP\)"),
        ("cut_memory", 1, "ZeroRedundancyOptimizer splits its state"),
    ],
)
def test_and_others_are_refused_in_the_loop(name: str, rank: int, said: str, played: Path) -> None:
    with pytest.raises(Mistake, match=said):
        raise Mistake((played / f"{name}-{rank}.txt").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_killed_process_leaves_the_steps_that_all_have_written(tmp_path: Path) -> None:
    context = spawn(processes.die, (tmp_path,), nprocs=WORLD, join=False)  # type: ignore[no-untyped-call]  # torch's own
    assert context is not None
    for process in context.processes:
        process.join()
    assert context.processes[1].exitcode == -signal.SIGKILL
    found = trace_of(tmp_path / "killed").attribute()
    assert found.sizes["step"] == 4
    missed = found["contribution"].sum("example") + found["decay"] - found["change"]
    assert float(abs(missed).max()) <= EXACT * float(abs(found["change"]).max())
