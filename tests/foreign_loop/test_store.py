"""A trace on disk tells what one in memory tells, whatever happened to the training."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop import outside
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.rule import Signatures
from ntkexp.foreign_loop.store.checkpoints import CheckpointPlan
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.atomic import SealedLog
from ntkexp.records.folder import RunFolder
from tests.foreign_loop import bugs, loops
from tests.foreign_loop.bugs import RECORDED
from tests.foreign_loop.loops import Body, Loop, Maker, batches, followed, loop

QUICK = ((loops.adamw, loops.scheduled_and_clipped), (loops.several, loops.plain))
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in loops.LOOPS if each not in QUICK]
LOOPS = [*QUICK, *SLOW]
CLOSE = 1e-12  # of parts that are summed from replayed weights, relative to all of them


def trained(given: Loop, body: Body, begin: int, end: int) -> None:
    for given.done, batch in zip(range(end), batches()):  # noqa: B905  there is no last batch
        if given.done >= begin:
            body(given, batch)


def same_parts(one: Trace, other: Trace) -> None:
    """The same examples added the same."""
    ours, theirs = one.attribute(), other.attribute()
    parts = theirs["contribution"].sel(example=ours["example"])
    for name, here, there in (("parts", ours["contribution"], parts), ("decay", ours["decay"], theirs["decay"])):
        missed = float(abs(here - there).max())
        assert missed <= CLOSE * float(abs(theirs["contribution"]).max()), name
    assert float(theirs["closure"].max()) < 1e-9  # relative to steps, of which the last are small


@pytest.mark.parametrize(("optimizers", "body"), LOOPS, ids=lambda part: getattr(part, "__name__", None))
def test_a_trace_on_disk_tells_the_same(optimizers: Maker, body: Body, tmp_path: Path) -> None:
    trace = followed(loop(optimizers), body, to=tmp_path / "run", every=3)
    same_parts(followed(loop(optimizers), body), trace)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizers", "body"), QUICK)
def test_so_does_one_with_the_weights_of_every_step(optimizers: Maker, body: Body, tmp_path: Path) -> None:
    trace = followed(loop(optimizers), body, to=tmp_path / "run", every=1)
    same_parts(followed(loop(optimizers), body), trace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizers", [loops.momentum, loops.adam, loops.adamw])
def test_steps_that_are_taken_again_have_the_bits_of_the_loop(optimizers: Maker, dtype: torch.dtype) -> None:
    """Through clipping too, whose factor is read of sums: one bit off, and a cast may round a weight otherwise."""
    given, weights = loop(optimizers, dtype), list[dict[str, torch.Tensor]]()

    def body(given: Loop, batch: torch.Tensor) -> None:
        weights.append(deepcopy(given.model.state_dict()))
        given.zero()
        given.back(batch)
        clip_grad_norm_(given.model.parameters(), 0.1)
        given.step()

    steps = followed(given, body, every=loops.STEPS).steps
    assert all(step.exact for step, _ in steps.forwards())
    for index, each in enumerate(weights):
        assert all(torch.equal(weight, each[name]) for name, weight in steps.start(index).items())


@pytest.mark.slow
@pytest.mark.parametrize("body", RECORDED, ids=lambda body: body.__name__)
def test_and_of_what_went_wrong(body: Body, tmp_path: Path) -> None:
    trace = followed(loop(loops.momentum), body, to=tmp_path / "run", every=3)
    same_parts(followed(loop(loops.momentum), body), trace)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("body", [bugs.noisy, bugs.with_a_penalty])
def test_and_refuses_the_same(body: Body, every: int, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"step \d: the gradient that was consumed is not that of the 6 examples"):
        followed(loop(loops.momentum), body, to=tmp_path / "run", every=every).attribute()


@pytest.mark.parametrize("optimizers", [loops.momentum, pytest.param(loops.adamw, marks=pytest.mark.slow)])
@pytest.mark.parametrize("back", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_a_loop_that_is_resumed_goes_on_there(optimizers: Maker, back: int, tmp_path: Path) -> None:
    """It is followed to step 5, and resumed from a checkpoint of step `back`."""
    given, kept = loop(optimizers), {}
    with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run", every=2):
        for step in range(5):
            trained(given, loops.plain, step, step + 1)
            kept[step + 1] = deepcopy((given.model.state_dict(), [each.state_dict() for each in given.optimizers]))
    resumed = loop(optimizers)
    resumed.model.load_state_dict(kept[back][0])
    for each, state in zip(resumed.optimizers, kept[back][1], strict=True):
        each.load_state_dict(state)
    with follow(resumed.model, resumed.optimizers, queries=given.queries, to=tmp_path / "run", every=2) as trace:
        trained(resumed, loops.plain, back, loops.STEPS)
    assert len(trace.steps) == loops.STEPS
    same_parts(followed(loop(optimizers), loops.plain), trace)


@pytest.mark.parametrize("optimizers", [pytest.param(loops.momentum, marks=pytest.mark.slow), loops.adamw])
def test_a_memory_that_was_not_loaded_is_recorded_as_lost(optimizers: Maker, tmp_path: Path) -> None:
    """Momentum of steps before the resume adds nothing after it: parts add up all the same."""
    given, queries = loop(optimizers), loop(optimizers).queries
    before = given.model(queries).detach()
    with follow(given.model, given.optimizers, queries=queries, to=tmp_path / "run", every=1):
        trained(given, loops.plain, 0, 4)
    given.optimizers = optimizers(given.model)
    with follow(given.model, given.optimizers, queries=queries, to=tmp_path / "run", every=1) as trace:
        trained(given, loops.plain, 4, 7)
    found = trace.attribute()
    change = (given.model(queries) - before).detach().numpy()
    assert len(trace.steps) == 7
    assert abs(found["contribution"].sum("example") + found["decay"] - change).max() <= CLOSE * abs(change).max()


def test_another_memory_is_refused(tmp_path: Path) -> None:
    given = loop(loops.momentum)
    for steps in ((0, 4), (4, 7)):
        with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run", every=2) as trace:
            trained(given, loops.plain, *steps)
        for state in given.optimizers[0].state.values():
            state["momentum_buffer"].mul_(0.5)
    with pytest.raises(Mistake, match=r"step 4: what the optimizer remembers of '0\.weight' is not what it remembered"):
        trace.attribute()


def test_what_was_written_before_a_kill_is_there(tmp_path: Path) -> None:
    """All files as they were after step 5, the last entry torn: a trace of the steps before it."""
    given = loop(loops.adamw)
    with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run", every=4):
        trained(given, loops.plain, 0, 6)
    log = tmp_path / "run" / "trace" / "steps.log"
    log.write_bytes(log.read_bytes()[:-3])
    (tmp_path / "run" / "trace" / "weights" / "00000006.bin").unlink()
    (tmp_path / "run" / "trace" / "ended.bin").unlink()
    whole = loop(loops.adamw)
    with follow(whole.model, whole.optimizers, queries=whole.queries) as expected:
        trained(whole, loops.plain, 0, 5)
    fresh = loop(loops.adamw)
    trained(fresh, loops.plain, 0, 5)
    with follow(fresh.model, fresh.optimizers, queries=fresh.queries, to=tmp_path / "run") as trace:
        pass
    assert len(trace.steps) == 5
    same_parts(expected, trace)


KILLED = """
import os, signal, sys
from ntkexp.foreign_loop import outside
from ntkexp.foreign_loop.follow import follow
from tests.foreign_loop import loops
given = loops.loop(loops.momentum)
with follow(given.model, given.optimizers, queries=given.queries, to=sys.argv[1], every=4):
    for given.done, batch in zip(range(7), loops.batches()):
        if given.done == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        loops.plain(given, batch)
"""


@pytest.mark.slow
def test_a_killed_training_leaves_its_steps(tmp_path: Path) -> None:
    """Another process was killed in its seventh step, and one that got as far by itself goes on."""
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    given, whole = loop(loops.momentum), loop(loops.momentum)
    trained(given, loops.plain, 0, 6)
    with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run") as trace:
        trained(given, loops.plain, 6, loops.STEPS)
    assert len(trace.steps) == loops.STEPS
    same_parts(followed(whole, loops.plain), trace)


def test_a_damaged_entry_is_refused(tmp_path: Path) -> None:
    trace = followed(loop(loops.sgd), loops.plain, to=tmp_path / "run")
    log = tmp_path / "run" / "trace" / "steps.log"
    content = bytearray(log.read_bytes())
    content[100] ^= 1
    log.write_bytes(content)
    with pytest.raises(Mistake, match=r"steps\.log is damaged at entry 0"):
        trace.attribute()


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


FILES = ("rows.log", "ended.bin", "start.bin", "weights/00000003.bin")


@pytest.mark.parametrize("name", ["steps.log", *(pytest.param(name, marks=pytest.mark.slow) for name in FILES)])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content, ends: flipped(content, ends[1] + 3), id="a length"),
        pytest.param(lambda content, ends: flipped(content, ends[-2]), id="the last length"),
        pytest.param(lambda content, ends: flipped(content, len(content) - 1), id="the last byte"),
        pytest.param(lambda content, ends: content[: ends[1]], id="cut behind an entry"),
        pytest.param(lambda content, ends: content[: ends[1] + 5], id="cut in an entry"),
        pytest.param(lambda content, ends: b"", id="nothing left"),
    ],
)
def test_damage_of_a_trace_is_refused_and_destroys_nothing(
    name: str, damage: Callable[[bytes, list[int]], bytes], tmp_path: Path
) -> None:
    """By who attributes it, and by the loop that is followed there again."""
    trace = followed(loop(loops.sgd), loops.plain, to=tmp_path / "run", every=3)
    path = tmp_path / "run" / "trace" / name
    files = TraceFolder(RunFolder(tmp_path / "run"))
    ends = {"steps.log": files.log.ends, "rows.log": files.rows.log.ends}.get(name, [0, 20, 40])
    path.write_bytes(damage(path.read_bytes(), ends))
    before = {each: each.read_bytes() for each in (tmp_path / "run").rglob("*") if each.is_file()}
    with pytest.raises(Mistake, match=path.name) as refusal:
        load_trace(find_trace(tmp_path / "run"), trace.module).attribute()
    assert "\n" not in str(refusal.value)
    assert {each: each.read_bytes() for each in before} == before
    if path.name == "00000003.bin":  # which the loop does not look at
        return
    with pytest.raises(Mistake, match=path.name):
        followed(loop(loops.sgd), loops.plain, to=tmp_path / "run", every=3)
    assert {each: each.read_bytes() for each in before} == before


def test_first_weights_that_are_damaged_cost_no_step(tmp_path: Path) -> None:
    followed(loop(loops.sgd), loops.plain, to=tmp_path / "run")
    path = tmp_path / "run" / "trace" / "weights" / "00000000.bin"
    path.write_bytes(flipped(path.read_bytes(), 100))
    log = tmp_path / "run" / "trace" / "steps.log"
    before = log.read_bytes()
    with pytest.raises(Mistake, match=r"00000000\.bin is missing, or not as it was written"):
        followed(loop(loops.sgd), loops.plain, to=tmp_path / "run")
    assert log.read_bytes() == before


def test_a_log_goes_on_behind_what_a_kill_left_unfinished(tmp_path: Path) -> None:
    log = SealedLog.opened(tmp_path / "log", "this")
    log.append(b"first")
    log.append(b"second")
    log.path.write_bytes(log.path.read_bytes()[:-3])
    log = SealedLog.opened(log.path, "this")
    log.append(b"third")
    assert [bytes(entry) for entry in SealedLog.opened(log.path, "this").entries()] == [b"first", b"third"]


def test_entries_are_those_that_were_written_one_behind_another(tmp_path: Path) -> None:
    """The second entry of another log of the same name, with another first one before it, is none of this log."""
    contents = []
    for first in (b"one", b"two"):
        log = SealedLog.opened(tmp_path / first.decode(), "this")
        log.append(first)
        log.append(b"second")
        contents.append((log.path.read_bytes(), log.ends[0]))
    (one, end), (other, _) = contents
    (tmp_path / "mixed").write_bytes(one[:end] + other[end:] + b"more")
    with pytest.raises(Mistake, match="mixed is damaged at entry 1"):
        SealedLog.opened(tmp_path / "mixed", "this")


def test_a_full_disk_leaves_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, append = loop(loops.sgd), SealedLog.append
    traces: list[Trace] = []

    def full(log: SealedLog, *content: bytes) -> int:
        if len(log) == 4:
            with log.path.open("ab") as file:
                file.write(content[0][:50])
            log.cut(len(log))
            raise NoPlace(f"{log.path} cannot grow")
        return append(log, *content)

    monkeypatch.setattr(SealedLog, "append", full)
    with pytest.raises(NoPlace, match="cannot grow"):
        followed(given, loops.plain, kept=traces, to=tmp_path / "run")
    monkeypatch.undo()
    assert len(traces[0].steps) == 4
    assert traces[0].attribute()["closure"].max() < 1e-9


def test_weights_that_cannot_be_written_are_told_and_leave_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written behind the loop's back, which hears of it at a later step."""
    traces, write = list[Trace](), TraceFolder.write_parts

    def full(files: TraceFolder, path: Path, parts: Sequence[bytes | memoryview]) -> int:
        if path.stem == "00000002":
            raise NoPlace(f"{path} cannot be written")
        return write(files, path, parts)

    monkeypatch.setattr(TraceFolder, "write_parts", full)
    with pytest.raises(NoPlace, match=r"00000002\.bin cannot be written"):
        followed(loop(loops.sgd), loops.plain, kept=traces, to=tmp_path / "run", every=2)
    monkeypatch.undo()
    assert 2 <= len(traces[0].steps) <= 4  # when the next weights are due, this write is over
    assert traces[0].attribute()["closure"].max() < 1e-9


def test_entries_of_a_log_are_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SealedLog.opened(tmp_path / "log", "this")
    log.append(b"first")
    open_path = Path.open

    def full(path: Path, *args: object, **more: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(NoPlace, match=r"cannot grow \(No space left on device\)"):
        log.append(b"second")
    monkeypatch.setattr(Path, "open", open_path)
    log.append(b"third")
    assert [bytes(entry) for entry in SealedLog.opened(log.path, "this").entries()] == [b"first", b"third"]


def other_model(to: Path) -> None:
    given = loop(loops.sgd)
    given.model.append(torch.nn.Linear(3, 3).double())
    followed(given, loops.plain, to=to)


def other_weights(to: Path) -> None:
    given = loop(loops.sgd)
    with torch.no_grad():
        given.model[0].get_parameter("weight").add_(1e-6)
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
    trained(given, loops.plain, 0, 1)
    followed(given, loops.plain, to=to / "new")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (other_model, "it holds another run, whose parameters is"),
        (other_weights, "it holds another run: the weights are those of none of its 8 steps"),
        (
            lambda to: followed(loop(loops.adam), loops.plain, to=to),
            r"optimizers is \['SGD'\] and not \['Adam'\]",
        ),
        (at_once, "is being written by another process"),
        (twice, "the optimizer is followed already"),
        (stepped, "has taken steps already"),
        (lambda to: followed(loop(loops.sgd), loops.plain, to=to.parent), "holds files that no run wrote"),
        (
            lambda to: followed(loop(loops.sgd), loops.plain, to=to / "new", every=10**7),
            r"GB of every=10000000 replayed steps; raise it, or give every=\d+",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(act: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    followed(loop(loops.sgd), loops.plain, to=tmp_path / "run")
    with pytest.raises(Mistake, match=said):
        act(tmp_path / "run")


def test_its_size_is_said_before_it_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ntkexp.follow"):
        followed(loop(loops.adam), loops.plain, to=tmp_path / "run")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "24 bytes per parameter" in line
    assert "GB are free" in line


def test_kept_weights_are_thinned_when_their_share_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ntkexp.foreign_loop.store.checkpoints.MAX_TRACE_BYTES", 10e3
    )  # bytes; weights and memory take 3.3e3 here
    monkeypatch.setattr("ntkexp.foreign_loop.store.checkpoints.STEPS_PER_CHECKPOINT", 1)
    trace = followed(loop(loops.momentum), loops.plain, to=tmp_path / "run")
    assert len(list((tmp_path / "run" / "trace" / "weights").iterdir())) <= 4
    same_parts(followed(loop(loops.momentum), loops.plain), trace)


def test_a_plan_stops_where_memory_would_not_hold_what_is_replayed() -> None:
    plan = CheckpointPlan.of(None, 1e6, 1e6, free=1e7, budget=MemoryBudget(6e7))
    assert (plan.every, plan.most) == (8, 20)
    assert plan.too_many(4)
    plan.every = 16
    assert not plan.too_many(4)


def test_a_signature_shows_the_size_of_an_error() -> None:
    """In the mean over errors; and the same error everywhere does not cancel."""
    torch.manual_seed(0)
    weight, signatures = torch.randn(37, 11, dtype=torch.float64), Signatures()
    errors = torch.randn(200, 37, 11, dtype=torch.float64)

    def signed(tensor: torch.Tensor) -> torch.Tensor:
        return signatures.of({"w": tensor})["w"]

    shown = torch.stack([signed(weight + each) - signed(weight) for each in errors])
    ratio = float(shown.square().sum() / errors.square().sum())
    assert 0.3 < ratio < 3  # the mean of the squares of 25 normal numbers
    shift = (signed(weight + 1e-6) - signed(weight)).norm()
    assert shift > 1e-6


def test_steps_up_to_what_memory_holds_are_explained() -> None:
    kept: list[Trace] = []
    with pytest.raises(Mistake, match="GB of the followed steps up to step 5; raise it, or follow fewer"):
        followed(loop(loops.momentum), loops.plain, kept, memory_gb=1.2e-5)
    found = kept[0].attribute(memory_gb=1.0)
    assert found.sizes["step"] == 6
    assert found["closure"].max() < 1e-9  # to rounding, as for a loop that came to its end


LIMITED = """
import sys
from pathlib import Path
import torch
from torch import nn
from ntkexp import follow
from ntkexp.foreign_loop.trace import Trace

def peak() -> int:
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(told["VmHWM"].split()[0]) * 1024

def traced(rows: int, queries: int, outputs: int, memory_gb: float = 0.1) -> Trace:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, outputs))
    optimizer, x = torch.optim.AdamW(net.parameters(), lr=0.01), torch.randn(6, rows, 8)
    with follow(net, optimizer, queries=torch.randn(queries, 8), memory_gb=memory_gb) as trace:
        for batch in x:
            optimizer.zero_grad()
            (net(batch) - batch[:, :outputs]).square().mean().backward()
            optimizer.step()
    return trace

traced(2, 2, 1, 1.0).attribute()  # libraries come in
before = peak()
found = traced(*map(int, sys.argv[1:])).attribute()
print(found.nbytes, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(330, 2500, 1), (160, 700, 3), (1000, 100, 5)])
def test_following_takes_no_more_than_its_memory(sizes: tuple[int, ...]) -> None:
    """Of the whole process, as the system counts it: what is freed and not given back is taken too."""
    command = [sys.executable, "-c", LIMITED, *map(str, sizes)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    size, taken = map(int, ended.stdout.split())
    assert 5e6 < size <= taken < 1e8


TUNED = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}


@pytest.mark.parametrize(("weights", "said"), [(10, {}), (2 * 10**7, {}), (10, TUNED)])
def test_free_memory_is_kept_for_small_models_and_as_before_afterwards(
    weights: int, said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: given.append(option), malloc_trim=lambda pad: None)
    monkeypatch.setattr(outside, "LIBRARY", library)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    kept = weights == 10 and not said
    with outside.memory_kept([torch.empty(weights, dtype=torch.float64)]):
        assert bool(given) == kept
    assert dict(given) == (outside.GLIBC_MAXIMA if kept else {})


def test_free_memory_is_kept_while_a_loop_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: given.append(option), malloc_trim=lambda pad: None)
    library.memcmp = outside.LIBRARY.memcmp
    monkeypatch.setattr(outside, "LIBRARY", library)
    model = nn.Linear(2, 1)
    with follow(model, torch.optim.SGD(model.parameters()), queries=torch.eye(2)):
        with outside.memory_kept(model.parameters()):
            pass
        assert dict(given)[outside.MMAP_THRESHOLD] == outside.KEPT_BYTES
    assert dict(given) == outside.GLIBC_MAXIMA
