"""Runs: whole commands, a step of the default run, what engines add, the sum backwards, and ways to read the path."""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ntkexp.config.compose import compose
from ntkexp.engine.base import Ended, Task, run_jobs, work
from ntkexp.engine.local import Local, cores
from ntkexp.path.integrals import Integrals, integrals_at_zero
from ntkexp.path.points import NetworkView
from ntkexp.path.step_kernel import StepBlock
from ntkexp.progress import Silent
from ntkexp.records.data import Trajectory
from ntkexp.report.plots.style import GREY, NARROW, colour, heading, house_style
from ntkexp.run.execute import execute
from ntkexp.run.loop import SilentListener, reverse_pass, train_steps
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState, begin
from ntkexp.sweep.jobs import RunJob
from tests.bench.cell import Cell, Machine, Table, medians, milliseconds, seconds
from tests.bench.peers import Race

# Whole commands, as a user waits for them: a small run, a finished sweep asked for again, reports of many runs.


COMMANDS = "Whole commands, the start of Python and the import of torch included"
TINY_COMMAND = ("model.width=8", "data.train=16", "data.query=4", "data.test=4", "steps=2", "data.seed=0", "--quiet")


def commands(_: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for every command; the runs of reports are as small as runs can be."""
    few, many, times = (1, 2, 1) if quick else (30, 200, 5)
    train = TINY_COMMAND if quick else ("steps=20", "model.width=32", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "train steps=20 model.width=32": ["train", *train, "--force"],
            f"sweep of {few} finished runs": ["sweep", f"seed=0..{few - 1}", *TINY_COMMAND, f"--out={folder}/few"],
            f"report of {few} runs": ["report", f"{folder}/few/runs", f"--out={folder}/few-report"],
            f"report of {many} runs": ["report", f"{folder}/many/runs", f"--out={folder}/many-report"],
        }
        call(["sweep", f"seed=0..{many - 1}", *TINY_COMMAND, f"--out={folder}/many"], folder)
        found = medians({name: partial(call, given, folder) for name, given in words.items()}, times)
    return [Cell(name, found[name]) for name in words]


def call(words: list[str], folder: str) -> None:
    """Run a command to its end."""
    subprocess.run([sys.executable, "-m", "ntkexp", *words], cwd=folder, check=True, capture_output=True)


# A step of the default experiment: what the descent takes, and what each rule adds to it.


RULES = ("secant", "left", "gauss")
TINY_DEFAULT = ("model.width=16", "data.train=16", "data.query=8", "data.test=8")


def default_run(*, quick: bool) -> list[Table]:
    """A row for every part."""
    steps, times = (2, 2) if quick else (4, 5)
    setting = prepare(compose([f"path.rule=[{','.join(RULES)}]", "path.nodes=1", *(TINY_DEFAULT if quick else ())]))
    path = setting.experiment.path
    integrals = {rule.option: integrals_at_zero(path.quadrature(rule), setting.domain) for rule in path.rule}
    acts: dict[str, Callable[[], object]] = {"descent": partial(walk, setting, {}, steps)}
    acts |= {name: partial(walk, setting, {name: integrals[name]}, steps) for name in RULES}
    found = medians(acts, times)
    alone = found["descent"]
    rows = [["descent alone", milliseconds(alone / steps)]]
    rows += [[f"{name} adds", milliseconds((found[name] - alone) / steps)] for name in RULES]
    counts = f"{len(setting.points.inputs)} points, {setting.points.train} training examples"
    return [Table(f"A step of the default experiment, {counts}", ("part", "ms"), rows)]


def walk(setting: Setting, integrals: dict[str, Integrals], steps: int) -> None:
    """Some steps from the start, with these integrals accumulated."""
    for step in islice(setting.descent.walk(setting.problem.weights), steps):
        for place in setting.domain.places:
            block = StepBlock(setting.points, step.segment, place)
            for each in integrals.values():
                each.add(step, block)


# The sum backwards for optimizers with memory: the time of a step back and the peak of memory, against M.
#
# Each size runs in a process of its own, since a peak is never forgotten.


STEPS = 6


def measured(width: int, train: int, threads: int) -> tuple[float, float, float, float]:
    """Seconds of a step, of a step back, gigabytes before it and at most."""
    torch.set_num_threads(threads)
    sizes = (f"model.width={width}", f"data.train={train}", "data.query=64", "data.test=0", "data=teacher")
    rest = ("optimizer=adam", "path.queries=[query]", "path.rule=[secant]", "path.count=2", f"steps={STEPS}")
    setting = prepare(compose([*sizes, *rest]))
    with tempfile.TemporaryDirectory() as folder:
        listener = SilentListener(Path(folder))
        state, start = begin(setting, listener.trajectory), time.perf_counter()
        train_steps(state, listener)
        before, turn = peak(), time.perf_counter()
        reverse_pass(state, listener)
        end = time.perf_counter()
    return (turn - start) / STEPS, (end - turn) / STEPS, before, peak()


def peak() -> float:
    """Gigabytes that this process used at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def backward(*, quick: bool) -> list[Table]:
    """A row for every number of training examples."""
    width, counts = (16, (8,)) if quick else (512, (32, 128, 512, 2048))
    rows = []
    for train in counts:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            step, back, before, most = pool.apply(measured, (width, train, torch.get_num_threads()))
        rows.append([str(train), milliseconds(step), milliseconds(back), f"{before:.2f}", f"{most:.2f}"])
    header = ("M", "step, ms", "step back, ms", "GB before", "GB at most")
    return [Table(f"Adam, w = {width}, 64 attributed points, one rule", header, rows)]


# What the local engine adds to a run: a process of its own, and a line to hear from it.
#
# A run that is finished already is asked for again and again, so that nothing is computed: a loop in this process looks
# it up, and the engine has it looked up by a new process each time.


FINISHED = (
    *("model.width=8", "data.train=8", "data.query=4", "data.test=4", "steps=2"),
    *("path.count=2", "path.error_samples=0", "threads=1"),
)


def engine(*, quick: bool) -> list[Table]:
    """A row for the in_a_loop, and one for the engine with a worker for each core."""
    runs = 10 if quick else 1000
    with tempfile.TemporaryDirectory() as out:
        task = finished(Path(out))
        by_engine(task, 1)  # its server has loaded everything
        found = {
            "a loop": seconds(partial(in_a_loop, task, runs)),
            "the engine": seconds(partial(by_engine, task, runs)),
        }
    rows = [[name, milliseconds(spent / runs)] for name, spent in found.items()]
    return [Table(f"Engine: {runs} runs with nothing to do, {cores()} workers", ("by", "ms a run"), rows)]


def finished(out: Path) -> Task:
    """A run that is finished, as a task."""
    experiment = compose(FINISHED)
    folder = execute(experiment, FINISHED, out, False, Silent())
    return Task(folder.name, RunJob(experiment.fields(), FINISHED, str(out), ()), str(out))


def in_a_loop(task: Task, runs: int) -> None:
    """Each in this process."""
    nothing_was_done(work(task) for _ in range(runs))


def by_engine(task: Task, runs: int) -> None:
    """Each in a process of its own, as many at once as there are cores."""
    events = run_jobs(Local(cores()), repeat(task, runs))
    nothing_was_done(event for event in events if isinstance(event, Ended))


def nothing_was_done(ends: Iterator[Ended]) -> None:
    """Nothing was to be done."""
    assert {end.how for end in ends} == {"found"}


# What it costs to read the path, and how near the sum then is to the network: rules at every step, and snapshots.
#
# All read the same training run, of a smooth network at half of its largest stable step; the seconds of training itself
# are taken off.


SHARED = ("model.activation=tanh", "path.error_samples=0", "path.queries=[query]")
QUICK = ("model.width=16", "data.train=16", "data.query=8", "data.test=8", "steps=20")
LONG = ("model.width=256", "data.train=64", "data.query=64", "data.test=8", "steps=500")
READINGS = {
    "left": ("path.rule=[left]",),
    "gauss, 1 node": ("path.rule=[gauss]", "path.nodes=1"),
    "gauss, 2 nodes": ("path.rule=[gauss]", "path.nodes=2"),
    "secant": ("path.rule=[secant]",),
    **{f"secant, {n} snapshots": ("path.rule=[secant]", "path.every=snapshots", f"path.count={n}") for n in (4, 8, 16)},
}


@dataclass(frozen=True)
class Cost:
    """One way to read the path."""

    name: str
    seconds: float
    error: float


def reading(*, quick: bool, plot: Path | None = None) -> list[Table]:
    """A row for each way."""
    found = costs((*SHARED, *(QUICK if quick else LONG)))
    if plot is not None:
        draw(found, plot)
    rows = [[cost.name, f"{cost.seconds:.3g}", f"{cost.error:.1e}"] for cost in found]
    return [Table("Reading the path of a training run", ("kernel", "seconds", "error"), rows)]


def costs(chosen: tuple[str, ...]) -> list[Cost]:
    """Each way in turn, after training alone, once to warm up and once to be measured."""
    settings = {name: prepare(compose([*chosen, *ways])) for name, ways in READINGS.items()}
    bare = next(iter(settings.values()))
    alone = min(seconds(lambda: list(bare.descent.walk(bare.problem.weights))) for _ in range(2))
    return [cost(name, setting, alone) for name, setting in settings.items()]


def cost(name: str, setting: Setting, alone: float) -> Cost:
    """A run, beside the same without its kernels."""
    state = begin(setting, no_trajectory)
    taken = seconds(lambda: all_steps(state))
    (integrals,) = state.accumulator.integrals.values()
    change = NetworkView(setting.points, state.weights).outputs - setting.start.outputs
    expected = change[setting.domain.attributed]
    missed = integrals.contributions[setting.domain.rows].sum(2) - expected
    return Cost(name, max(taken - alone, 0.0), float(missed.norm() / expected.norm()))


def all_steps(state: RunState) -> None:
    """All steps."""
    for step in state.setting.descent.walk(state.weights):
        state.advance(step, due=state.timetable.due(step.index))


def no_trajectory(rows: int, size: int) -> Trajectory:
    """None of these ways goes back."""
    raise NotImplementedError


LEAST = 1e-3  # seconds that a picture shows


def draw(found: list[Cost], path: Path) -> None:
    """Error against cost."""
    with house_style(), torch.no_grad():
        figure = Figure(figsize=(NARROW, 2.6), layout="constrained")
        axes = figure.subplots()
        for each in found:
            rule = each.name.partition(",")[0]
            marker = "s" if "snapshots" in each.name else "o"
            place = max(each.seconds, LEAST), each.error  # of a difference of two times, which may be below nothing
            axes.plot(*place, marker, color=colour(rule), markersize=4)
            axes.annotate(each.name, place, xytext=(4, 3), textcoords="offset points", fontsize=6, color=GREY)
        axes.set(xscale="log", yscale="log", xlabel="seconds on top of training", ylabel="relative error")
        axes.margins(x=0.3)
        heading(figure, "Snapshots cost little, secants err by nothing")
        figure.savefig(path)
