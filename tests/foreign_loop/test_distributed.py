"""Processes that train together leave one trace, as a loop does that adds up all gradients.

In the fast tests the ranks take turns in one process, and gradients are averaged by hand. Slow tests start processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.distributed_c10d import Store
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from ntkexp.foreign_loop.follow import FollowSession, follow
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from tests.foreign_loop import loops, processes
from tests.foreign_loop.loops import EXAMPLES, Loop, Maker, apart, loop, missed, outputs_of, parts_of
from tests.foreign_loop.processes import WORLD, network

STEPS = 4
CLOSE = 1e-11  # of gradients that are summed in another order, relative to all that was added
EXACT = 1e-12  # relative to the change that training made


class Board(Store):
    """The store of a process group, without patience: a missing entry is an error at once."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.entries[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not set(keys) <= self.entries.keys():
            raise RuntimeError("timeout")


@dataclass
class Ranks:
    """Copies of a loop that train as one; `parts` are the batches of each at every step."""

    optimizers: Maker
    world: int
    clip: float = 1e9
    parts: int = 1
    loops: list[Loop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loops = [loop(self.optimizers) for _ in range(self.world)]

    def batches(self, step: int, rank: int) -> Sequence[Tensor]:
        """The batches of a rank, which differ in size, as a last batch does."""
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randperm(EXAMPLES, generator=generator)[: 3 * self.parts + rank].chunk(self.parts)

    def step(self, index: int, *, averages: bool = True, present: int | None = None) -> None:
        """All ranks take a step on their averaged gradients, or the first ones do."""
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
        """Lower the rate, clip and step."""
        for group in (group for optimizer in each.optimizers for group in optimizer.param_groups):
            group["lr"] *= 0.9
        clip_grad_norm_(each.model.parameters(), self.clip)
        each.step()

    def alone(self, steps: int = STEPS, **options: Any) -> Trace:
        """The trace of one process that takes the same steps."""
        one = loop(self.optimizers)
        with follow(one.model, one.optimizers, queries=one.queries, **options) as trace:
            for index in range(steps):
                one.zero()
                for rank in range(self.world):
                    for batch in self.batches(index, rank):
                        one.back(batch, self.parts * self.world)
                self.finish(one)
        return trace


class Follow(ExitStack):
    """Follow each rank as if in another process."""

    def __init__(self, ranks: Ranks, to: Path, **options: Any) -> None:
        super().__init__()
        self.ranks, self.to, self.options, self.store = ranks, to, options, Board()

    def __enter__(self) -> Follow:
        self.traces = [self.begin(rank) for rank in range(self.ranks.world)]
        return self

    def begin(self, rank: int, **others: Any) -> Trace:
        given = self.ranks.loops[rank]
        init_process_group("fake", rank=rank, world_size=self.ranks.world, store=self.store)
        try:
            options = {"queries": given.queries, "to": self.to, **self.options, **others}
            return self.enter_context(follow(given.model, given.optimizers, **options))
        finally:
            destroy_process_group()

    def break_off(self) -> None:
        """The training goes no further."""
        self.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def agree(ours: Trace, theirs: Trace, **options: Any) -> None:
    """Both traces have the same parts, to rounding."""
    here, there = (parts_of(each, **options) for each in (ours, theirs))
    assert here["example"].to_numpy().tolist() == there["example"].to_numpy().tolist()
    for name in {"contribution", "decay", "by_step", "by_component", "change", "effect"} & set(there):
        assert float(abs(here[name] - there[name]).max()) <= CLOSE * float(abs(there["contribution"]).max()), name


def trained(ranks: Ranks, to: Path, **options: Any) -> Trace:
    """All steps of all ranks, followed."""
    with Follow(ranks, to, **options) as seen:
        for index in range(STEPS):
            ranks.step(index)
    return seen.traces[0]


def surprise(outputs: Tensor, _: object) -> Tensor:
    """A measure of the outputs."""
    return outputs.logsumexp(1) - outputs[:, 0]


SUMS: dict[str, tuple[Ranks, dict[str, Any]]] = {
    "outputs, accumulated and clipped": (Ranks(loops.adamw, 2, clip=0.2, parts=2), {"every": 3}),
    "three ranks": (Ranks(loops.several, 3), {}),
    "a measure": (Ranks(loops.adamw, 2, clip=0.2), {"measure": surprise}),
}


@pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.slow] * (k == "three ranks")) for k in SUMS])
def test_ranks_leave_the_trace_of_one_process(name: str, tmp_path: Path) -> None:
    """Batches differ in size, and the rate falls. Parts, decay and components add up to the change."""
    ranks, options = SUMS[name]
    given = ranks.loops[0]
    read = options.get("measure", lambda outputs, _: outputs)
    start = read(outputs_of(given.model, given.queries), None)
    trace = trained(ranks, tmp_path / "run", **options)
    agree(trace, ranks.alone(**options), by="module")
    found = parts_of(trace, by="module")
    change = (read(outputs_of(given.model, given.queries), None) - start).reshape(found["change"].shape)
    assert missed(found, change) <= CLOSE
    assert apart(found["by_component"].sum("component"), found["contribution"]) <= CLOSE
    if ranks.clip > 1:
        assert found["gradient_factor"].to_numpy() == pytest.approx(1 / ranks.world, rel=1e-10)  # rounding of sums


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_effects_are_those_of_one_process(clip: float, tmp_path: Path) -> None:
    """Each rank renormalises its own mean. A third is no scale that a scaler divides by."""
    ranks = Ranks(loops.adamw, 3, clip=clip)
    loss = loops.loss_of(ranks.loops[0])
    agree(trained(ranks, tmp_path / "run", loss=loss), ranks.alone(loss=loss), effects=True)


@pytest.mark.slow
def test_a_removal_is_divided_by_a_loop_of_one_process(tmp_path: Path) -> None:
    ranks = Ranks(loops.momentum, 3, clip=0.2)
    options = {"loss": loops.loss_of(ranks.loops[0])}
    trained(ranks, tmp_path / "run", **options)
    files = find_trace(tmp_path / "run")
    found = loop_without(files, lambda: ranks.alone(**options), "renormalised", [0, 1, 2], [0, 1], Silent())
    assert abs(found.actual).min() > 1e-4
    assert found.closure < CLOSE


def test_a_stopped_rank_leaves_the_steps_of_all(tmp_path: Path) -> None:
    """Rank 1 dies after its second step, while rank 0 takes a third."""
    ranks = Ranks(loops.momentum, 2)
    with Follow(ranks, tmp_path / "run", every=1) as seen:
        for index in range(2):
            ranks.step(index)
        ranks.step(2, present=1)
        seen.break_off()
    assert len(seen.traces[0].steps) == 2
    agree(seen.traces[0], ranks.alone(2))
    assert len(load_trace(find_trace(tmp_path / "run"), loop(loops.momentum).model).steps) == 2


def test_ranks_resume_from_a_checkpoint(tmp_path: Path) -> None:
    ranks, kept = Ranks(loops.adamw, 2), list[Any]()
    with Follow(ranks, tmp_path / "run") as seen:
        for index in range(3):
            ranks.step(index)
            kept.append([loops.checkpoint(each) for each in ranks.loops])
        seen.break_off()
    again = Ranks(loops.adamw, 2)
    for each, state in zip(again.loops, kept[1], strict=True):
        loops.restore(each, state)
    with Follow(again, tmp_path / "run") as seen:
        for index in range(2, STEPS):
            again.step(index)
    assert len(seen.traces[0].steps) == STEPS
    agree(seen.traces[0], ranks.alone())


# --- Refused.


def ended_early(folder: Path) -> None:
    ranks = Ranks(loops.sgd, 2)
    with Follow(ranks, folder) as seen:
        ranks.step(0)
        ranks.step(1, present=1)
    seen.traces[0].attribute()


def not_averaged(folder: Path) -> None:
    ranks = Ranks(loops.adamw, 2)
    with Follow(ranks, folder) as seen:
        for index in range(3):
            ranks.step(index, averages=index != 1)
    seen.traces[0].attribute()


def missing_shard(folder: Path) -> None:
    trace = trained(Ranks(loops.sgd, 2), folder)
    rmtree(folder / "trace" / "rank-1")
    trace.attribute()


def attributed_by_the_second(folder: Path) -> None:
    ranks = Ranks(loops.sgd, 2)
    with Follow(ranks, folder) as seen:
        ranks.step(0)
    seen.traces[1].attribute()


def begun(folder: Path, change: Callable[[Ranks], object] = bool, steps: int = 0, *others: dict[str, Any]) -> None:
    """Ranks begin to follow, after something has changed; and take steps."""
    ranks = Ranks(loops.sgd, 2)
    with torch.no_grad():
        change(ranks)
    stack = Follow(ranks, folder)
    with ExitStack() as closing:
        closing.callback(stack.close)
        for rank, other in enumerate(others):
            stack.begin(rank, **other)
        for index in range(steps):
            ranks.step(index)


def shift(ranks: Ranks) -> None:
    ranks.loops[1].model[4].get_parameter("bias").add_(1)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "ended early": (ended_early, r"step 1: rank 1 took no part in this .* another rank took 2 steps"),
    "not averaged": (
        not_averaged,
        r"step 1: after this step, the weights of rank 1 differ from those of rank 0: '\d\.\w+' by",
    ),
    "a missing shard": (missing_shard, r"the part of rank 1 \(of 2\) is missing"),
    "attributed by the second": (
        attributed_by_the_second,
        r"rank 1 has written its part .* trace\.attribute\(\) only if rank == 0",
    ),
    "not followed": (lambda folder: begun(folder, bool, 1, {}), "rank 1 of 2 does not follow into"),
    "other weights": (
        lambda folder: begun(folder, shift, 0, {}, {}),
        r"rank 1 begins at other weights than rank 0 \('4\.bias'",
    ),
    "another folder": (
        lambda folder: begun(folder, bool, 0, {}, {"to": folder.parent / "other"}),
        r"rank 1 follows into .*other, but rank 0 did not within",
    ),
    "no folder": (
        lambda folder: begun(folder, bool, 0, {"to": None}),
        r"2 processes train together, .* to=…, the same in every process",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_do_not_train_as_one_are_refused(case: str, tmp_path: Path) -> None:
    act, said = REFUSED[case]
    with pytest.raises(Mistake, match=said):
        act(tmp_path / "run")


def test_a_refusal_of_the_first_rank_reaches_all(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    stack = Follow(Ranks(loops.sgd, 2), tmp_path)
    for rank, said in ((0, "holds files that no run wrote"), (1, "rank 0: .* holds files that no run wrote")):
        with pytest.raises(Mistake, match=said):
            stack.begin(rank)


# --- Libraries that train in several processes.


def test_a_call_around_other_calls_is_not_followed() -> None:
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


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_session_that_was_broken_off_has_no_end(error: BaseException | None, tmp_path: Path) -> None:
    given = loop(loops.sgd)
    session = FollowSession(queries=given.queries, to=tmp_path / "run")
    session.begin(given.model, given.optimizers)
    loops.plain(given, torch.arange(4))
    session.end(error)
    assert len(session.trace.steps) == 1
    assert find_trace(tmp_path / "run").ended.is_file() == (error is None)


# --- Processes.


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the scenes that two processes have played."""
    folder = tmp_path_factory.mktemp("played")
    spawn(processes.play, (folder,), nprocs=WORLD)  # type: ignore[no-untyped-call]  # torch's own
    return folder


def trace_of(folder: Path) -> Trace:
    """The trace as another process finds it, without a page."""
    return replace(load_trace(find_trace(folder), network()), folder=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulated", "plain"])
def test_parts_add_up_to_the_change_by_all_processes(name: str, played: Path) -> None:
    found = trace_of(played / name).attribute()
    assert missed(found, torch.load(played / f"{name}.pt")) <= EXACT
    assert (found.sizes["step"], found.sizes["example"]) == (6, processes.EXAMPLES)
    if name == "plain":
        assert found["gradient_factor"].to_numpy() == pytest.approx(1 / WORLD, rel=1e-10)  # rounding of sums


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("joined", r"step 4: rank 1 took no part in this .* without join\(\)"),
        ("compressed", r"step 0: the optimizer's gradient is not the gradient of the 14 recorded examples"),
    ],
)
def test_attribution_refuses_what_the_processes_did(name: str, said: str, played: Path) -> None:
    with pytest.raises(Mistake, match=said):
        trace_of(played / name).attribute()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("absent", 0, "rank 1 of 2 does not follow into"),
        ("sharded_weights", 1, r"the model is a FSDPSequential, which divides weights .*\(FSDP\)"),
        ("sharded_state", 1, "ZeroRedundancyOptimizer divides its state"),
    ],
)
def test_the_loop_refuses_what_the_processes_did(name: str, rank: int, said: str, played: Path) -> None:
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
    assert missed(found) <= EXACT
