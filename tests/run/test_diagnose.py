"""Diagnostics agree with independent computations, do not affect training, and raise if they cannot be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from ntkexp.cli.main import run as run_command
from ntkexp.effects.trajectory import flat_like
from ntkexp.experiment.identity import identity
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import Memory as OptimizerMemory
from ntkexp.path.points import total_gradient
from ntkexp.records.diagnostics import COLUMN
from ntkexp.report.loaded_run import load_run
from ntkexp.run.diagnose import Measurements, RunDiagnostics
from ntkexp.run.loop import run
from ntkexp.run.setting import Setting, prepare
from ntkexp.statistics import alignment, label_alignment
from tests.run.commands import TINY, only_run
from tests.run.small import Memory, small

ALL = (
    "diagnostics=[kernel_velocity,layer_alignment,eigenfunctions,gradient_norm,sharpness,taylor,layer_kernels,"
    "function_momentum]"
)
SHORT = (
    "steps=4",
    "model.width=6",
    "data.train=9",
    "data.query=5",
    "data.test=2",
    "path.schedule=2",
    "path.rule=[secant]",
)
CASES = {
    "one output": SHORT,
    "classes": (*SHORT, "data.classes=[0,1,2]", "loss=cross_entropy", "model.activation=tanh"),
    "an output scale": (*SHORT, "init.alpha=3", "init.centred=true", "loss=logistic", "loss.reduction=sum"),
}


@dataclass(eq=False)
class Measuring(Memory):
    """Keeps the values of diagnostics by step."""

    measured: dict[int, Measurements] = field(default_factory=dict)

    def on_diagnostics(self, step: int, measured: Measurements) -> None:
        self.measured[step] = measured


@cache
def followed(words: Sequence[str]) -> tuple[Setting, Measuring]:
    setting = prepare(small(*words, ALL, "ladder.machine=[]"))
    listener = Measuring()
    run(setting, listener)
    return setting, listener


def numbers(measured: Measurements, name: str) -> dict[str, float | int | None]:
    prefix = f"{COLUMN}{name}."
    return {key.removeprefix(prefix): value for key, value in measured.numbers.items() if key.startswith(prefix)}


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_gradient_and_sharpness_are_those_of_the_whole_hessian(words: Sequence[str]) -> None:
    setting, listener = followed(words)
    experiment, problem = setting.experiment, setting.problem
    flat = flat_like(problem.weights)
    count = problem.train
    weight = (1 / count if experiment.loss.reduction == "mean" else 1.0) * experiment.loss_scale

    def objective(vector: Tensor) -> Tensor:
        outputs = setting.points.reader.function(flat.weights(vector), problem.inputs[:count])
        return experiment.loss.value(outputs, problem.targets[:count]).sum() * weight

    for step, weights in zip((0, 2, 4), (problem.weights, listener.weights[1], listener.weights[3]), strict=True):
        vector = flat.vector(weights).detach()
        top = float(torch.linalg.eigvalsh(jacrev(jacrev(objective))(vector))[-1])
        slope = float(torch.func.grad(objective)(vector).norm())
        measured = listener.measured[step]
        assert measured.numbers[f"{COLUMN}gradient_norm"] == pytest.approx(slope, rel=1e-12)
        sharpness = numbers(measured, "sharpness")
        assert sharpness["lambda_max"] == pytest.approx(top, rel=1e-5)  # Lanczos stops at changes of 1e-7
        if step < 4:
            expected = listener.rows[step]["step_size"] * top / 2  # type: ignore[operator]
            assert sharpness["stability"] == pytest.approx(expected, rel=1e-5)
    assert numbers(listener.measured[4], "sharpness")["stability"] is None


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_the_kernels_of_layers_add_up_to_the_kernel(words: Sequence[str]) -> None:
    setting, listener = followed(words)
    diagnostics = RunDiagnostics(setting)
    train = setting.problem.train
    layers = {name.rpartition(".")[0] for name in setting.problem.weights}
    total = torch.zeros_like(setting.start.kernel[:train])
    for layer in layers:
        names = [name for name in setting.problem.weights if name.startswith(f"{layer}.")]
        kernel = diagnostics.start_kernel_of(names)
        assert torch.equal(kernel, listener.measured[0].arrays[f"layer_kernels.{layer}"])
        total += kernel
        expected = label_alignment(kernel, setting.problem.targets[:train])
        found = numbers(listener.measured[0], "layer_alignment")
        assert found[f"labels.{layer}"] == pytest.approx(expected, rel=1e-10)
        assert found[f"start.{layer}"] == pytest.approx(1.0, rel=1e-10)
    torch.testing.assert_close(total, setting.start.kernel[:train], rtol=1e-11, atol=1e-12)
    for step, measured in listener.measured.items():
        stored = sum(measured.arrays[f"layer_kernels.{layer}"] for layer in layers)
        torch.testing.assert_close(stored, listener.kernels[step][:train], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_eigenfunctions_satisfy_their_equation_at_all_points(words: Sequence[str]) -> None:
    setting, listener = followed(words)
    train, outputs = setting.problem.train, setting.problem.outputs
    for step, measured in listener.measured.items():
        rows = listener.kernels[step].flatten(2).flatten(0, 1)  # all points, train × out
        values = measured.arrays["eigenfunctions.values"]
        functions = measured.arrays["eigenfunctions.functions"].flatten(1)  # mode, point × out
        modes = functions[:, : train * outputs]
        eye = torch.eye(len(values), dtype=torch.float64)
        torch.testing.assert_close(modes @ modes.mT, eye, rtol=0, atol=1e-12)
        kept = values > 1e-6 * values[0]  # division by λ magnifies the rounding of others
        assert kept.sum() >= 3
        left, right = rows @ modes.mT, functions.mT * values
        torch.testing.assert_close(left[:, kept], right[:, kept], rtol=0, atol=1e-11 * float(values[0]))
        assert (modes.amax(1) == modes.abs().amax(1)).all()


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_velocity_is_the_change_of_direction_for_each_step(words: Sequence[str]) -> None:
    setting, listener = followed(words)
    kernels = {step: kernel[: setting.problem.train] for step, kernel in listener.kernels.items()}
    found = {step: numbers(measured, "kernel_velocity") for step, measured in listener.measured.items()}
    assert [found[step]["velocity"] for step in (0, 2, 4)] == [
        None,
        pytest.approx((1 - alignment(kernels[0], kernels[2])) / 2, abs=1e-14),
        pytest.approx((1 - alignment(kernels[2], kernels[4])) / 2, abs=1e-14),
    ]
    assert found[0]["rotation"] == pytest.approx(0, abs=1e-12)
    rotations = [found[step]["rotation"] for step in (2, 4)]
    assert all(isinstance(rotation, float) and 0 <= rotation <= 1 for rotation in rotations)


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_expansions_are_those_of_whole_derivatives(words: Sequence[str]) -> None:
    setting, listener = followed(words)
    problem = setting.problem
    flat = flat_like(problem.weights)
    start = flat.vector(problem.weights)

    def outputs(vector: Tensor) -> Tensor:
        return setting.points.reader.function(flat.weights(vector), problem.inputs)

    def along(distance: Tensor, direction: Tensor) -> Tensor:
        return outputs(start + distance * direction)

    zero = torch.zeros((), dtype=torch.float64)
    initial = listener.measured[0]
    assert set(numbers(initial, "taylor").values()) == {None}
    for step, weights in ((2, listener.weights[1]), (4, listener.weights[3])):
        vector = flat.vector(weights)
        direction = vector - start
        change = (outputs(vector) - outputs(start)).detach()
        first = jacrev(along)(zero, direction)
        second = first + jacrev(jacrev(along))(zero, direction) / 2
        found = numbers(listener.measured[step], "taylor")
        for split, points in (("train", slice(0, problem.train)), ("query", slice(problem.train, None))):
            scale = change[points].norm()
            for order, expansion in ((1, first), (2, second)):
                expected = float((expansion - change)[points].norm() / scale)
                assert found[f"{split}.order_{order}"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("depth", "exact"), [(0, 1), (1, 2)])
def test_expansions_of_linear_networks_end_with_their_depth(depth: int, exact: int) -> None:
    """The outputs are a polynomial of degree depth + 1 in the weights."""
    words = (f"model.depth={depth}", "model.activation=linear", "ladder.machine=[]", "diagnostics=[taylor]")
    listener = Measuring()
    run(prepare(small(*SHORT, *words)), listener)
    found = numbers(listener.measured[4], "taylor")
    for split in ("train", "query"):
        for order in (1, 2):
            error = found[f"{split}.order_{order}"]
            assert error is not None
            assert (error < 1e-11) == (order >= exact)


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=momentum", "optimizer.momentum=0.8", "optimizer.dampening=0.3", "optimizer.weight_decay=0.1"),
        ("optimizer=nesterov", "optimizer.momentum=0.8", "optimizer.clip_norm=0.01", "optimizer.layers={network.1: 2}"),
        ("optimizer=adam", "optimizer.eps=1e-3", "optimizer.weight_decay=0.1"),
        ("optimizer=adamw", "optimizer.eps=1e-3", "optimizer.weight_decay=0.1", "optimizer.batch=4"),
        ("optimizer=rmsprop", "optimizer.eps=1e-3"),
        ("optimizer=gd",),
    ],
    ids=lambda words: words[0].removeprefix("optimizer="),
)
def test_momentum_is_what_the_step_has_without_the_present_gradient(words: Sequence[str]) -> None:
    """The oracle repeats the step of the optimizer with other memory. Without memory, but with the same denominator,
    the step is the part of the present gradient. The rest is the part of the momentum."""
    smooth = ("model.activation=tanh", "diagnostics=[function_momentum]", "path.schedule=1")
    setting = prepare(small(*SHORT, *smooth, *words, "ladder.machine=[]"))
    listener = Measuring()
    run(setting, listener)
    problem, optimizer = setting.problem, setting.descent.optimizer
    flat = flat_like(problem.weights)

    def outputs(vector: Tensor) -> Tensor:
        return setting.points.reader.function(flat.weights(vector), problem.inputs)

    steps = list(setting.descent.steps_from(problem.weights))
    memory: OptimizerMemory = {}
    for step in steps:
        # the memory before the step enters the weights after it linearly, if the squares stay the same
        scaled = {
            name: {key: part * (0 if name in ("velocity", "mean") else 1) for key, part in parts.items()}
            for name, parts in memory.items()
        }
        gradient = total_gradient(step.view.loss_gradients(step.output_gradient), step.view.weights)
        alone, _ = optimizer.update(step.index, step.view.weights, gradient, step.sizes, scaled)
        by_momentum = flat.vector(step.end) - flat.vector(alone)
        still = flat.vector(step.view.weights)
        if optimizer.decouples:
            still = still * (1 - step.step_size * optimizer.weight_decay)
        by_gradient = flat.vector(alone) - still
        jacobian = jacrev(outputs)(flat.vector(step.view.weights))
        measured = numbers(listener.measured[step.index], "function_momentum")
        for split, points in (("train", slice(0, problem.train)), ("query", slice(problem.train, None))):
            left, right = (jacobian[points] @ by_momentum, jacobian[points] @ by_gradient)
            ratio = float(left.norm() / right.norm())
            assert measured[f"{split}.ratio"] == pytest.approx(ratio, rel=1e-9, abs=1e-12)
            if optimizer.needs_backward_sum and step.index and words[0] != "optimizer=rmsprop":
                cosine = float((left * right).sum() / left.norm() / right.norm())
                assert measured[f"{split}.ratio"] > 0.01  # type: ignore[operator]
                assert measured[f"{split}.cosine"] == pytest.approx(cosine, rel=1e-9, abs=1e-12)
            else:
                assert (measured[f"{split}.ratio"], measured[f"{split}.cosine"]) == (0, None)
        memory = step.memory
    assert set(numbers(listener.measured[len(steps)], "function_momentum").values()) == {None}


def test_diagnostics_leave_training_as_it_is() -> None:
    plain = small(*SHORT, "ladder.machine=[]")
    setting, listener = followed(SHORT)
    assert identity(plain) != identity(setting.experiment)
    undisturbed = Memory()
    run(prepare(plain), undisturbed)
    for row, other in zip(undisturbed.rows, listener.rows, strict=True):
        assert row == {key: value for key, value in other.items() if not key.startswith(COLUMN)}
    for weights, others in zip(undisturbed.weights, listener.weights, strict=True):
        assert all(torch.equal(weights[name], others[name]) for name in weights)


OWN = dedent("""
    import torch

    def norms(state):
        return {"weight": max(float(w.norm()) for w in state.weights.values()), "outputs": state.outputs}

    def one(state):
        return state.step

    def writes(state):
        next(iter(state.weights.values())).mul_(2)
        return 0.0

    def writes_inputs(state):
        state.blocks[0][0].add_(1)
        return 0.0

    def step(state):
        return state.outputs

    def text(state):
        return "large"

    def empty(state):
        return torch.zeros(0)

    def climbs(state):
        return {"../up": 1.0}

    def grows(state):
        return {f"number_{state.step}": 1.0}

    def longer(state):
        return torch.zeros(1 + state.step)

    def fails(state):
        return state.weigths

    def draws(state):
        return torch.rand(2)
""")
REFUSALS = {
    "writes": "writes changes state.weights['network.1.weight'] in place",
    "writes_inputs": "writes_inputs changes state.blocks[0][0] in place",
    "step": "'step' cannot be the name of a column",
    "text": "text is a str; return a number, a tensor, None, or a dict of them",
    "empty": "empty is a tensor of torch.float32 with shape [0]",
    "climbs": "'climbs.../up' cannot be the name of a column",
    "grows": "at step 1, grows.number_0 has another shape than before training, or exists only at one of them",
    "longer": "at step 1, longer has another shape than before training, or exists only at one of them",
    "fails": "line 37: AttributeError: 'TrainingState' object has no attribute 'weigths'",
    "absent": "there is no function absent in the file",
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "my_diagnostics.py"
    file.write_text(OWN, encoding="utf-8")
    return file


def train(out: Path, own: Path, *words: str) -> int:
    return run_command(
        ("train", *TINY, "steps=3", "path.schedule=1", *words, f"--trust={own}", f"--out={out}", "--quiet")
    )


@pytest.mark.parametrize(("function", "reason"), REFUSALS.items(), ids=REFUSALS)
def test_a_wrong_function_is_refused_in_one_line(
    function: str, reason: str, own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, own, f"diagnostics=[{own}:{function}]")
    (line,) = capfd.readouterr().err.splitlines()
    assert reason in line


def test_a_function_of_ones_own_adds_columns_and_arrays(own: Path, tmp_path: Path) -> None:
    assert not train(tmp_path, own, f"diagnostics=[{own}:norms,{own}:one]")
    loaded = load_run(only_run(tmp_path))
    assert loaded.metrics[f"{COLUMN}one"].tolist() == [0, 1, 2, 3]
    assert loaded.metrics[f"{COLUMN}norms.weight"].notna().all()
    stored = loaded.diagnostics
    assert stored["step"].to_numpy().tolist() == [0, 1, 2, 3]
    last = loaded.predictions.sel(machine="f_T").to_numpy()[loaded.points["train"]]
    assert stored["norms.outputs"].to_numpy()[-1] == pytest.approx(last, abs=1e-12)


def test_runs_without_arrays_have_no_store(own: Path, tmp_path: Path) -> None:
    assert not train(tmp_path, own, f"diagnostics=[{own}:one]")
    loaded = load_run(only_run(tmp_path))
    assert not (loaded.path / "diagnostics.zarr").exists()
    assert not loaded.diagnostics


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("diagnostics=[sharpness,sharpness]",), "sharpness is given twice"),
        (("diagnostics=[eigenfunctions]", "path.kernels=none"), "eigenfunctions reads tangent kernels"),
        (("diagnostics=[layer_alignment]", "path.kernels=trace"), "layer_alignment reads tangent kernels"),
        (("diagnostics=[gradient_norm]", "path.kernels=none", "path.schedule=adaptive"), "use path.schedule=log"),
        (("diagnostics=[function_momentum]", "optimizer=flow"), "reads training steps, and optimizer=flow has none"),
        (("diagnostics=[sharpnes]",), "did you mean 'sharpness'"),
        (("diagnostics=[net.py]",), "FILE.py:FUNCTION"),
    ],
)
def test_unusable_diagnostics_are_refused(words: Sequence[str], reason: str) -> None:
    with pytest.raises(Mistake, match=reason):
        small(*words)


def test_random_numbers_of_a_diagnostic_do_not_depend_on_the_runs_before(own: Path) -> None:
    """A run that is repeated, or resumed in another process, draws them again."""
    words = (*SHORT, "ladder.machine=[]", f"diagnostics=[{own}:draws]")
    drawn = []
    for _ in range(2):
        state, listener = torch.random.get_rng_state(), Measuring()
        run(prepare(small(*words, trust=[str(own)])), listener)
        assert torch.equal(torch.random.get_rng_state(), state)
        drawn.append({step: measured.arrays["draws"].tolist() for step, measured in listener.measured.items()})
        torch.rand(1)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][2]
