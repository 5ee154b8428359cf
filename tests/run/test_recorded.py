"""Recorded weights equal the final weights of a shorter run, and give the recorded outputs."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import identity
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.progress import Silent
from ntkexp.records.atomic import Damaged
from ntkexp.report.loaded_run import LoadedRun, load_run
from ntkexp.run.setting import least_memory, prepare
from tests.run.commands import free_disk, promised
from tests.run.small import execute_in, small

TINY = (
    *("data.train=9", "data.query=5", "data.test=2", "model.width=6", "threads=1", "checkpoint_seconds=0"),
    *("ladder.machine=[]", "path.rule=[left]", "steps=6", "path.schedule=2"),
)
BOTH = "path.record=[outputs,weights]"
CASES = {
    "kernels": (*TINY, BOTH),
    "no kernels": (*TINY, BOTH, "path.kernels=none", "data.classes=[0,1,2]", "loss=cross_entropy"),
    "an optimizer with memory": (*TINY, BOTH, "optimizer=adam", "optimizer.step_size=0.02", "optimizer.eps=1e-4"),
    "some splits": (*TINY, BOTH, "path.queries=[query,test]", "init.antisymmetric=true"),
    "a schedule by kernels": (*TINY, BOTH, "path.schedule=adaptive", "path.count=3"),
    "two phases": (*TINY, BOTH, "data=sequence", "data.train=12", "data.query=6", "data.test=6"),
    "float32": (*TINY, BOTH, "dtype=float32"),
}


class Interrupting(Silent):
    """Sends Ctrl-C after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, done: int, note: str = "") -> None:
        if done == self.after:
            signal.raise_signal(signal.SIGINT)


def executed(out: Path, words: Sequence[str]) -> LoadedRun:
    return load_run(execute_in(out, small(*words), words))


def saved_weights(run: LoadedRun, moment: str) -> dict[str, np.ndarray]:
    weights = torch.load(run.path / "weights.pt")[moment]
    return {name: weight.numpy() for name, weight in weights.items()}


def outputs_by_torch(experiment: Experiment, weights: dict[str, np.ndarray]) -> np.ndarray:
    """The outputs at all points, by the network of the run with other weights."""
    setting = prepare(experiment)
    values: dict[str, Tensor] = {
        name: torch.from_numpy(weight).to(setting.problem.inputs.dtype) for name, weight in weights.items()
    }
    outputs = setting.points.reader.function(values, setting.problem.inputs)
    return outputs[setting.domain.summed_points].detach().numpy()


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
@pytest.mark.sample(4)
def test_records_are_the_network_along_the_path(words: Sequence[str], tmp_path: Path) -> None:
    run = executed(tmp_path, words)
    steps = run.recorded["step"].to_numpy().tolist()
    assert steps[0] == 0
    assert steps[-1] == 6
    eps = float(np.finfo(str(run.config["dtype"])).eps)
    for step in steps:
        expected = outputs_by_torch(small(*words), run.weights_at(step))
        np.testing.assert_allclose(run.outputs_at(step), expected, rtol=0, atol=100 * eps)
    for moment, step in (("start", 0), ("end", 6)):
        np.testing.assert_equal(run.weights_at(step), saved_weights(run, moment))
    assert identity(small(*words)) != identity(small(*words, "path.record=[]"))


@pytest.mark.parametrize("name", ["kernels", "no kernels"])
@pytest.mark.sample(1)
def test_weights_of_a_step_are_the_end_of_a_shorter_run(name: str, tmp_path: Path) -> None:
    words = CASES[name]
    run = executed(tmp_path, words)
    assert run.recorded["step"].to_numpy().tolist() == [0, 2, 4, 6]
    for step in (2, 4):
        shorter = executed(tmp_path, (*words, f"steps={step}"))
        np.testing.assert_equal(run.weights_at(step), saved_weights(shorter, "end"))


def test_recording_leaves_training_as_it_is(tmp_path: Path) -> None:
    run, plain = executed(tmp_path, CASES["kernels"]), executed(tmp_path, TINY)
    assert not plain.recorded
    same = {name: content for name, content in promised(plain.path).items() if name != "config.json"}
    assert same.items() <= promised(run.path).items()


@pytest.mark.parametrize("name", ["kernels", "no kernels", "an optimizer with memory"])
@pytest.mark.sample(1)
def test_an_interrupted_run_records_the_same_bytes(name: str, tmp_path: Path) -> None:
    words = CASES[name]
    whole = executed(tmp_path / "whole", words)
    for after in (1, 3, 4):
        with pytest.raises(KeyboardInterrupt):
            execute_in(tmp_path / "cut", small(*words), words, Interrupting(after))
    assert promised(executed(tmp_path / "cut", words).path) == promised(whole.path)


def test_a_run_that_stops_early_records_its_last_step(tmp_path: Path) -> None:
    run = executed(tmp_path, (*CASES["no kernels"], "steps=40", "stop_at_loss=0.8", "path.schedule=30"))
    last = int(run.metrics["step"].iloc[-1])
    assert run.recorded["step"].to_numpy().tolist() == [0, last]
    np.testing.assert_equal(run.weights_at(last), saved_weights(run, "end"))


def test_diagnostics_are_measured_without_kernels(tmp_path: Path) -> None:
    run = executed(tmp_path, (*TINY, "path.kernels=none", "diagnostics=[gradient_norm]"))
    measured = run.metrics["diagnostics.gradient_norm"].notna()
    assert run.metrics["step"][measured].tolist() == [0, 2, 4, 6]


def test_absent_records_are_refused_in_one_line(tmp_path: Path) -> None:
    plain = executed(tmp_path, TINY)
    with pytest.raises(Mistake, match=r"recorded nothing; run it with path.record=\[outputs,weights\]"):
        plain.outputs_at(0)
    run = executed(tmp_path, (*TINY, "path.record=[weights]"))
    with pytest.raises(Mistake, match=r"recorded no outputs; run it with path.record=\[outputs\]"):
        run.outputs_at(0)
    with pytest.raises(Mistake, match="recorded no weights at this step; it did at 0, 2, 4, 6"):
        run.weights_at(3)
    chunk = run.path / "recorded.zarr" / "weights" / "c" / "1" / "0"
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.raises(Damaged, match=r"recorded\.zarr"):
        LoadedRun(run.path, run.config, run.metrics, run.ladder).weights_at(2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("path.record=[outputs,outputs]",), "give each once"),
        (("path.record=[weight]",), "did you mean 'weights'"),
        (("path.record=[outputs]", "path.kernels=none", "path.schedule=adaptive"), "there are none with path.kernels"),
    ],
)
def test_unusable_settings_are_refused(words: Sequence[str], reason: str) -> None:
    with pytest.raises(Mistake, match=reason):
        small(*words)


def test_a_small_disk_is_found_out_before_the_first_step(tmp_path: Path) -> None:
    words = (*TINY, "path.record=[weights]")
    count = sum(weight.numel() for weight in prepare(small(*words)).problem.weights.values())
    needed = 8 * count * 4  # four snapshots
    for free, fits in ((needed, True), (needed - 1, False)):
        with mock.patch("os.statvfs", free_disk(free)):
            if fits:
                executed(tmp_path / "fits", words)
                continue
            with pytest.raises(NoPlace, match=r"weights of 4 steps take .* leave weights out of path\.record"):
                executed(tmp_path / "small", words)


def test_recording_weights_is_part_of_the_memory_plan() -> None:
    plain, recording = (least_memory(small(*TINY, f"path.record={names}")) for names in ("[]", "[outputs,weights]"))
    assert recording.always - plain.always == 3 * 8 * plain.parameters
