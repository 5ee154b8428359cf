"""A trace on disk has the contributions of one in memory, also after a resume. A damaged or foreign one is refused."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.signatures import Signatures
from ntkexp.foreign_loop.store.checkpoints import CheckpointPlan
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.folder import RunFolder
from ntkexp.records.sealed_log import SealedLog
from tests.foreign_loop import bugs, loops
from tests.foreign_loop.bugs import RECORDED
from tests.foreign_loop.loops import OPTIMIZERS, Body, Loop, Maker, followed, loop, parts_of, random_loop, same_parts
from tests.foreign_loop.test_adds_up import with_other_draws
from tests.run.commands import free_disk

SLOW = pytest.mark.slow


def loaded(folder: Path, make: Callable[[], Loop] = lambda: loop(loops.momentum)) -> Trace:
    """The trace as another process finds it."""
    return load_trace(find_trace(folder), make().model)


# --- The same contributions.


def freezing(given: Loop, batch: Tensor) -> None:
    """The first layer is frozen half-way, and its momentum moves it on."""
    given.model[0].requires_grad_(given.done < 4)
    loops.plain(given, batch)


def random_adamw() -> Loop:
    return random_loop(loops.adamw)


FAST_STORED = (
    (loops.adamw, loops.scheduled_and_clipped),
    (loops.several, loops.plain),
    loops.SHARPNESS[0],
)
STORED: tuple[tuple[Maker, Body, int], ...] = (
    *((maker, body, 3) for maker, body in (*loops.LOOPS, *loops.SHARPNESS)),
    (loops.adamw, loops.scheduled_and_clipped, 1),
    (loops.several, loops.plain, 1),
    *((loops.momentum, body, 3) for body in RECORDED[::3]),
)


@pytest.mark.parametrize(
    ("maker", "body", "every"),
    [pytest.param(*case, marks=SLOW if case[:2] not in FAST_STORED else ()) for case in STORED],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_a_trace_on_disk_has_the_same_contributions(maker: Maker, body: Body, every: int, tmp_path: Path) -> None:
    same_parts(followed(loop(maker), body, to=tmp_path / "run", every=every), followed(loop(maker), body))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("clip", "bound"), [(clip_grad_norm_, 0.03), (clip_grad_value_, 0.03), (clip_grad_value_, 1e-6)]
)
@pytest.mark.parametrize("maker", [loops.momentum, loops.adam, loops.adamw])
def test_replayed_steps_have_the_bits_of_the_loop(
    maker: Maker, clip: Callable[[Iterable[Tensor], float], object], bound: float, dtype: torch.dtype
) -> None:
    """The replay is exact with clipping, too. A wrong bit in the clipping factor could change a rounded weight.

    The search finds a bound far below all elements only if it tries bounds far below the largest element."""
    given, weights = loop(maker, dtype), list[dict[str, Tensor]]()

    def body(given: Loop, batch: Tensor) -> None:
        weights.append(deepcopy(given.model.state_dict()))
        given.zero()
        given.back(batch)
        clip(given.model.parameters(), bound)
        given.step()

    steps = followed(given, body, every=loops.STEPS).steps
    assert all(step.exact for step, _ in steps.forwards())
    for index, each in enumerate(weights):
        assert all(torch.equal(weight, each[name]) for name, weight in steps.start(index).items())


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("body", [bugs.noisy, bugs.with_a_penalty])
def test_a_trace_on_disk_is_refused_for_the_same_reason(body: Body, every: int, tmp_path: Path) -> None:
    with pytest.raises(
        Mistake, match=r"step \d: the optimizer's gradient is not the gradient of the 6 recorded examples"
    ):
        followed(loop(loops.momentum), body, to=tmp_path / "run", every=every).attribute()


def test_checkpoints_are_thinned_when_their_share_of_the_disk_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", free_disk(40e3))  # a quarter is for checkpoints of 3.3 kB each
    trace = followed(loop(loops.momentum), loops.plain, to=tmp_path / "run", end=26)
    assert len(list((tmp_path / "run" / "trace" / "weights").iterdir())) <= 3
    same_parts(trace, followed(loop(loops.momentum), loops.plain, end=26))


def test_checkpoints_are_not_thinned_if_memory_cannot_hold_the_replayed_steps() -> None:
    plan = CheckpointPlan.of(None, 1e6, 1e6, free=1e7, budget=MemoryBudget(6e7))
    assert (plan.every, plan.max_interval) == (8, 20)
    assert [plan.too_many(count) for count in (2, 3, 4)] == [False, True, True]
    plan.every = 16
    assert not plan.too_many(4)


# --- Resumed loops.


RESUMED: dict[str, tuple[Callable[[], Loop], Body, int]] = {
    "momentum": (lambda: loop(loops.momentum), loops.plain, 3),
    "adamw": (lambda: loop(loops.adamw), loops.plain, 3),
    "dropout": (random_adamw, with_other_draws, 3),
    **{f"momentum, {back}": (lambda: loop(loops.momentum), loops.plain, back) for back in (4, 5)},
    **{f"adamw, {back}": (lambda: loop(loops.adamw), loops.plain, back) for back in (4, 5)},
    **{each.__name__: (partial(loop, each), freezing, 4) for each in OPTIMIZERS},
}
FAST = ("momentum", "adamw", "dropout", *[each.__name__ for each in OPTIMIZERS][::10])


@pytest.mark.parametrize("case", [pytest.param(case, marks=[SLOW] * (case not in FAST)) for case in RESUMED])
@pytest.mark.sample(4)
def test_a_resumed_loop_has_the_same_contributions(case: str, tmp_path: Path) -> None:
    """Stopped after step 4, and resumed from an earlier checkpoint. The bytes differ, and the identity is kept."""
    make, body, back = RESUMED[case]
    trace = loops.resumed(make, body, back, to=tmp_path / "run", every=2)
    assert len(trace.steps) == loops.STEPS
    close = 1e-10 if case.startswith("NAdam") else loops.CLOSE  # torch loads its products of betas in float64
    same_parts(loaded(tmp_path / "run", make), followed(make(), body), close)


@pytest.mark.parametrize("maker", [pytest.param(loops.momentum, marks=SLOW), loops.adamw])
def test_momentum_that_was_not_loaded_adds_nothing_after_the_resume(maker: Maker, tmp_path: Path) -> None:
    given = loop(maker)
    start = loops.outputs_of(given.model, given.queries)
    for begin, end in ((0, 4), (4, 7)):
        given.optimizers = maker(given.model)
        trace = followed(given, loops.plain, begin=begin, end=end, to=tmp_path / "run", every=1)
    assert len(trace.steps) == 7
    assert loops.missed(parts_of(trace), loops.outputs_of(given.model, given.queries) - start) <= loops.CLOSE


@pytest.mark.parametrize("factor", [0.5, 1 + 2e-12], ids=["half", "near"])
def test_another_memory_is_refused(factor: float, tmp_path: Path) -> None:
    given = loop(loops.momentum)
    for begin, end in ((0, 4), (4, 7)):
        trace = followed(given, loops.plain, begin=begin, end=end, to=tmp_path / "run", every=2)
        for state in given.optimizers[0].state.values():
            state["momentum_buffer"].mul_(factor)
    with pytest.raises(Mistake, match=r"step 4: the optimizer's momentum of '0\.weight' is not the one"):
        trace.attribute()


def test_a_torn_entry_leaves_the_steps_before_it(tmp_path: Path) -> None:
    """All files as a kill leaves them in the sixth step."""
    followed(loop(loops.adamw), loops.plain, end=6, to=tmp_path / "run", every=4)
    trace = tmp_path / "run" / "trace"
    (trace / "steps.log").write_bytes((trace / "steps.log").read_bytes()[:-3])
    for name in ("weights/00000006.bin", "ended.bin"):
        (trace / name).unlink()
    fresh = loop(loops.adamw)
    loops.train(fresh, loops.plain, end=5)
    resumed = followed(fresh, loops.plain, begin=5, end=5, to=tmp_path / "run")
    assert len(resumed.steps) == 5
    same_parts(resumed, followed(loop(loops.adamw), loops.plain, end=5))


@pytest.mark.parametrize("change", ["replace", "unlink"])
def test_a_loop_goes_into_a_folder_that_a_kill_left(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied before each file gets its name, or is removed when the loop begins anew."""
    changed: Callable[..., Any] = getattr(Path, change)
    killed: list[Path] = []

    def follow_into(folder: Path) -> Trace:
        return followed(loop(loops.sgd), loops.plain, end=3, to=folder, every=2)

    def leaving(path: Path, *arguments: Any, **options: Any) -> Any:
        killed.append(shutil.copytree(tmp_path / "run", tmp_path / f"killed-{len(killed)}"))
        return changed(path, *arguments, **options)

    if change == "unlink":
        follow_into(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Path, change, leaving)
        whole = follow_into(tmp_path / "run")
    assert len(killed) > 3
    for folder in killed:
        same_parts(follow_into(folder), whole)


# --- Damage, and files of another training.


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


FILES = ("rows.log", "ended.bin", "start.bin", "weights/00000000.bin", "weights/00000003.bin")
DAMAGES: dict[str, Callable[[bytes, list[int]], bytes]] = {
    "a number": lambda content, ends: flipped(content, 100),
    "a length": lambda content, ends: flipped(content, ends[1] + 3),
    "the last length": lambda content, ends: flipped(content, ends[-2]),
    "the last byte": lambda content, ends: flipped(content, len(content) - 1),
    "cut behind an entry": lambda content, ends: content[: ends[1]],
    "cut in an entry": lambda content, ends: content[: ends[1] + 5],
    "nothing left": lambda content, ends: b"",
}


@pytest.mark.parametrize("name", ["steps.log", *(pytest.param(name, marks=SLOW) for name in FILES)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_and_destroys_nothing(name: str, damage: str, tmp_path: Path) -> None:
    """By attribution, and by a loop that is followed into the same folder."""
    trace = followed(loop(loops.sgd), loops.plain, to=tmp_path / "run", every=3)
    path = tmp_path / "run" / "trace" / name
    files = TraceFolder(RunFolder(tmp_path / "run"))
    ends = {"steps.log": files.log.ends, "rows.log": files.rows.log.ends}.get(name, [0, 20, 40])
    path.write_bytes(DAMAGES[damage](path.read_bytes(), ends))
    before = {each: each.read_bytes() for each in (tmp_path / "run").rglob("*") if each.is_file()}
    with pytest.raises(Mistake, match=path.name):
        load_trace(find_trace(tmp_path / "run"), trace.module).attribute()
    if path.name != "00000003.bin":  # which the loop does not read
        with pytest.raises(Mistake, match=path.name):
            followed(loop(loops.sgd), loops.plain, to=tmp_path / "run", every=3)
    assert {each: each.read_bytes() for each in before} == before


def other_weights(by: float) -> Loop:
    """A loop with equal configuration and data, from other weights."""
    given = loop(loops.momentum)
    with torch.no_grad():
        for weight in given.model.parameters():
            weight.mul_(by)
    return given


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The folders of two trainings from different weights, and of the first one again."""
    place = tmp_path_factory.mktemp("three")
    for name, by in (("one", 1.0), ("other", 1.25), ("again", 1.0)):
        followed(other_weights(by), loops.plain, to=place / name, every=3)
    return place / "one", place / "other", place / "again"


@pytest.mark.parametrize("name", ["start.bin", "rows.log", "steps.log", "weights", "ended.bin", "asked.bin", ""])
def test_files_of_another_training_are_refused(three: tuple[Path, ...], tmp_path: Path, name: str) -> None:
    """One by one, and all together below the configuration of the first."""
    folder = shutil.copytree(three[0], tmp_path / "run")
    theirs, ours = three[1] / "trace" / name, folder / "trace" / name
    if ours.is_dir():
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
    else:
        shutil.copy(theirs, ours)
    with pytest.raises(Mistake, match=r"or damaged|is damaged"):
        loaded(folder).attribute()


def test_a_training_has_an_identity_and_its_weights_another(three: tuple[Path, ...]) -> None:
    """A reader sees no difference between the configurations."""
    one, other, again = (json.loads((folder / "config.json").read_text()) for folder in three)
    assert one["follow"] == other["follow"]
    assert len({each["trace_identity"] for each in (one, other, again)}) == 3
    assert one["start_weights"] == again["start_weights"] != other["start_weights"]


def test_other_weights_at_the_start_are_refused_with_any_seal(three: tuple[Path, ...], tmp_path: Path) -> None:
    folder = shutil.copytree(three[0], tmp_path / "run")
    files, theirs = TraceFolder(RunFolder(folder)), TraceFolder(RunFolder(three[1]))
    files.write(files.weights_at(0), theirs.read(theirs.weights_at(0)))
    with pytest.raises(Mistake, match=r"00000000\.bin does not hold the weights with which the trace began"):
        loaded(folder)


@pytest.mark.parametrize("thinned", [False, True], ids=["later weights", "no later weights"])
def test_a_trace_without_an_end_is_reported_or_refused(
    thinned: bool, three: tuple[Path, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is cut after four entries, with weights of later steps or without."""
    assert len(loaded(three[0]).steps) == loops.STEPS
    assert not caplog.records
    folder = shutil.copytree(three[0], tmp_path / "run")
    files, log = TraceFolder(RunFolder(folder)), folder / "trace" / "steps.log"
    log.write_bytes(log.read_bytes()[: files.log.ends[3]])
    files.ended.unlink()
    if thinned:
        for event in files.checkpoints:
            if event > 4:
                files.weights_at(event).unlink()
        assert len(loaded(folder).steps) == 4
        assert "has 4 steps and no end" in caplog.text
    else:
        with pytest.raises(Mistake, match=r"steps\.log is damaged: .* weights after entry 8"):
            loaded(folder).attribute()


# --- The log, and a full disk.


def entries(log: SealedLog) -> list[bytes]:
    return [bytes(entry) for entry in SealedLog.read(log.path, "this").entries()]


def test_a_log_goes_on_behind_an_unfinished_entry(tmp_path: Path) -> None:
    log = SealedLog.read(tmp_path / "log", "this")
    log.append(b"first")
    log.append(b"second")
    log.path.write_bytes(log.path.read_bytes()[:-3])
    log = SealedLog.read(log.path, "this")
    log.append(b"third")
    assert entries(log) == [b"first", b"third"]


def test_an_entry_of_another_log_is_refused(tmp_path: Path) -> None:
    """The other log has the same name, and another entry before it."""
    contents = []
    for first in (b"one", b"two"):
        log = SealedLog.read(tmp_path / first.decode(), "this")
        log.append(first)
        log.append(b"second")
        contents.append((log.path.read_bytes(), log.ends[0]))
    (one, end), (other, _) = contents
    (tmp_path / "mixed").write_bytes(one[:end] + other[end:] + b"more")
    with pytest.raises(Mistake, match="mixed is damaged at entry 1"):
        SealedLog.read(tmp_path / "mixed", "this")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write behind some byte of any file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 1 << 20], ids=["small", "large"])
def test_an_entry_that_does_not_fit_on_the_disk_leaves_those_before(size: int, tmp_path: Path) -> None:
    """The system writes the first half of the entry, and refuses the rest."""
    log = SealedLog.read(tmp_path / "log", "this")
    log.append(b"first")
    before = log.path.read_bytes()
    refused = pytest.raises(NoPlace, match=r"log cannot grow \(File too large\); choose another place")
    with files_of_at_most(len(before) + size // 2), refused:
        log.append(b"a" * (size // 4), b"b" * size)
    assert log.path.read_bytes() == before
    log.append(b"third")
    assert entries(log) == [b"first", b"third"]


def test_a_full_disk_leaves_the_steps_before(tmp_path: Path) -> None:
    traces, log = list[Trace](), tmp_path / "run" / "trace" / "steps.log"

    def full(given: Loop, batch: Tensor) -> None:
        with files_of_at_most(log.stat().st_size + 50 if given.done == 4 else 2**40):
            loops.plain(given, batch)

    with pytest.raises(NoPlace, match="cannot grow"):
        followed(loop(loops.sgd), full, kept=traces, to=tmp_path / "run")
    assert len(traces[0].steps) == 4
    assert parts_of(traces[0])["closure"].max() < 1e-9


def test_weights_that_cannot_be_written_leave_the_steps(tmp_path: Path) -> None:
    """A thread writes them, and the loop raises at a later step."""
    traces, given = list[Trace](), loop(loops.sgd)
    given.model[2] = nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 8)).double()  # 280 kB
    given.optimizers = loops.sgd(given.model)

    limits = ExitStack()

    def full(given: Loop, batch: Tensor) -> None:
        if given.done == 1:
            limits.enter_context(files_of_at_most(200_000))
        loops.plain(given, batch)

    with limits, pytest.raises(NoPlace, match=r"00000002\.bin cannot be written"):
        followed(given, full, kept=traces, to=tmp_path / "run", every=2)
    assert 2 <= len(traces[0].steps) <= 4  # when the next weights are due, this write is over
    assert parts_of(traces[0])["closure"].max() < 1e-9


def other_model(to: Path) -> None:
    given = loop(loops.sgd)
    given.model.append(nn.Linear(3, 3).double())
    followed(given, loops.plain, to=to)


def at_once(to: Path) -> None:
    given = loop(loops.sgd)
    with follow(given.model, given.optimizers, queries=given.queries, to=to):
        followed(loop(loops.sgd), loops.plain, to=to)


def twice(to: Path) -> None:
    given = loop(loops.sgd)
    with follow(given.model, given.optimizers, queries=given.queries):
        followed(given, loops.plain, to=to)


def stepped(to: Path) -> None:
    given = loop(loops.momentum)
    loops.train(given, loops.plain, end=1)
    followed(given, loops.plain, to=to / "new")


def into(to: Path, maker: Maker = loops.sgd, **more: Any) -> Trace:
    return followed(loop(maker), loops.plain, to=to, **more)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (other_model, "the folder holds another run, whose parameters is"),
        (lambda to: followed(other_weights(1 + 1e-6), loops.plain, to=to), "the folder holds another run"),
        (lambda to: into(to, loops.adam), r"optimizers is \['SGD'\] and not \['Adam'\]"),
        (at_once, "is being written by another process"),
        (twice, "the optimizer is followed already"),
        (stepped, "has taken steps already"),
        (lambda to: into(to.parent), "holds files that no run wrote"),
        (lambda to: into(to / "new", every=10**7), r"GB of every=10000000 replayed steps; raise it, or give every=\d+"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(act: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    into(tmp_path / "run")
    with pytest.raises(Mistake, match=said):
        act(tmp_path / "run")


def test_a_loop_at_weights_of_no_stored_step_is_refused(tmp_path: Path) -> None:
    into(tmp_path / "run", loops.momentum)
    with pytest.raises(Mistake, match="the folder holds another run: none of its 8 steps has these weights"):
        followed(other_weights(1 + 1e-6), loops.plain, to=tmp_path / "run")


def test_the_size_of_a_trace_is_announced_unless_it_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ntkexp.follow"):
        into(tmp_path / "run", loops.adam, quiet=True)
        assert not caplog.records
        into(tmp_path / "other", loops.adam)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "24 bytes per parameter" in line
    assert "GB are free" in line


# --- Memory.


def test_a_signature_shows_the_size_of_an_error() -> None:
    """On average over errors; a constant error does not cancel."""
    weight, signatures = torch.randn(37, 11, dtype=torch.float64), Signatures()
    errors = torch.randn(200, 37, 11, dtype=torch.float64)

    def signed(tensor: Tensor) -> Tensor:
        return signatures.of({"w": tensor})["w"]

    shown = torch.stack([signed(weight + each) - signed(weight) for each in errors])
    assert 0.3 < float(shown.square().sum() / errors.square().sum()) < 3  # a mean of squares of 25 normal numbers
    assert (signed(weight + 1e-6) - signed(weight)).norm() > 1e-6


def test_steps_up_to_the_limit_of_memory_are_explained() -> None:
    kept: list[Trace] = []
    with pytest.raises(Mistake, match="GB of the followed steps up to step 5; raise it, or follow fewer"):
        followed(loop(loops.momentum), loops.plain, kept, memory_gb=1.2e-5)
    found = kept[0].attribute(memory_gb=1.0)
    assert found.sizes["step"] == 6
    assert found["closure"].max() < 1e-9


LIMITED = """
import sys
from pathlib import Path
import torch
from torch import nn
from tests.foreign_loop.loops import fitted

def peak():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024

def attributed(rows, queries, outputs, memory_gb=0.1):
    net, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, outputs)), torch.randn(6, rows, 8)
    loss = lambda step: (net(x[step]) - x[step][:, :outputs]).square().mean()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return fitted(net, optimizer, loss, 6, queries=torch.randn(queries, 8), memory_gb=memory_gb).attribute()

attributed(2, 2, 1, 1.0)  # loads the libraries
before = peak()
print(attributed(*map(int, sys.argv[1:])).nbytes, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(330, 2500, 1), (160, 700, 3), (1000, 100, 5)])
def test_following_takes_no_more_than_its_memory(sizes: tuple[int, ...]) -> None:
    """The system counts the whole process, with memory that was freed and not returned."""
    command = [sys.executable, "-c", LIMITED, *map(str, sizes)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    size, taken = map(int, ended.stdout.split())
    assert 5e6 < size <= taken < 1e8


KEPT = """
import torch
from ctypes import CDLL, Structure, c_size_t
from ntkexp import follow
from ntkexp.allocator import memory_kept

class Mallinfo(Structure):  # `mapped` are the bytes that go back when they are freed
    _fields_ = [(name, c_size_t) for name in ("a", "b", "c", "d", "mapped", "f", "g", "h", "i", "j")]

mallinfo = CDLL(None).mallinfo2
mallinfo.restype = Mallinfo

def is_kept(size):
    before = mallinfo().mapped
    block = torch.empty(size, dtype=torch.uint8)
    return mallinfo().mapped - before < size

model = torch.nn.Linear(2, 1)
found = [is_kept(2**26)]
for weights in (torch.empty(2 * 10**7, dtype=torch.float64), model.weight):
    with memory_kept([weights]):
        found.append(is_kept(2**26))
with follow(model, torch.optim.SGD(model.parameters()), queries=torch.eye(2)):
    with memory_kept(model.parameters()):  # an attribution inside the loop
        pass
    found.append(is_kept(2**27))
print(*found, is_kept(2**28 - 1))  # each is larger than the free blocks
"""


@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="glibc only")
@pytest.mark.slow
@pytest.mark.parametrize("variable", ["", "GLIBC_TUNABLES"])
def test_freed_memory_is_kept_for_small_models_while_they_are_followed(variable: str) -> None:
    """Before, for a large model, for a small one, in a loop, and afterwards; never if the user configures malloc."""
    environment = {**os.environ, **({variable: "glibc.malloc.check=0"} if variable else {})}
    ended = subprocess.run([sys.executable, "-c", KEPT], env=environment, capture_output=True, text=True, check=True)
    kept = not variable
    assert ended.stdout.split() == [str(each) for each in (False, False, kept, kept, False)]
