"""Parts of a path: at some outputs or points, of some components, by traces, or of contributions alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev
from torch.utils._pytree import tree_leaves

from ntkexp.experiment.identity import identity
from ntkexp.kernel.read import plan as reading
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.mistake import Mistake
from ntkexp.run.loop import train_steps
from ntkexp.run.setting import prepare, survey
from ntkexp.run.state import begin
from ntkexp.statistics import kernel_change
from tests.run.small import Memory, ran, small

SHORT = ("data.classes=[1,3,8]", "loss=cross_entropy", "steps=4", "path.rule=[secant,left]")
ROUNDING = 1e-13  # other products of matrices, over 4 steps
WAYS = (
    ("optimizer=gd",),
    ("optimizer=sgd", "optimizer.weight_decay=0.1", "optimizer.step_size=0.1", "path.error_samples=4"),
    ("optimizer=adam", "optimizer.step_size=0.01", "path.attributed=12"),
    ("optimizer=gd", "optimizer.step_size=0.1", "path.every=snapshots", "path.count=4"),
    ("optimizer=sgd", "optimizer.step_size=0.1", "path.kernels=none"),
    ("optimizer=flow", "optimizer.step_size=0.2", "optimizer.tolerance=1e-3", "path.rule=[gauss]", "steps=2"),
)
SOME = [(way, part) for way in WAYS for part in ("path.outputs=[2,0]", "path.queries=[query]")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("way", "part"), [each for each in SOME if each != (WAYS[5], "path.queries=[query]")])
def test_the_path_at_some_outputs_or_points_is_a_part_of_the_whole(way: tuple[str, ...], part: str) -> None:
    some, whole = ran(*SHORT, *way, part), ran(*SHORT, *way)
    place = whole.setting.problem.split_slices["query"] if "queries" in part else slice(None)
    outputs = [0, 2] if "outputs" in part else [0, 1, 2]
    for rule, path in some.outcome.matrices.paths.items():
        for name in ("kernel", "contributions", "decay", "half_by"):
            ours, all_of_theirs = getattr(path, name), getattr(whole.outcome.matrices.paths[rule], name)
            if ours is None or all_of_theirs is None:
                continue
            theirs = all_of_theirs[place][:, outputs]
            assert ours.shape == theirs.shape
            known = ours.isfinite() & theirs.isfinite()
            assert known.any() or not ours.numel()
            assert (ours - theirs)[known].norm() <= ROUNDING * theirs[known].norm()


def test_the_table_says_where_it_is_exact_and_what_machines_lack() -> None:
    of_output, of_points = (ran(*SHORT, part).table for part in ("path.outputs=[1]", "path.queries=[query]"))
    row = of_output["secant", "train"]
    assert row.exact
    assert row.agreement is None
    assert row.note.endswith("at output 1")
    assert "path.outputs=all" in of_output["kernel_regression", "train"].note
    assert of_points["rbf_identity", "query"].exact
    assert "add train to path.queries" in of_points["kernel_regression", "query"].note


def test_all_outputs_by_number_are_all() -> None:
    assert small(*SHORT, "path.outputs=[2,1,0]").path.chosen_outputs(3) == small(*SHORT).path.chosen_outputs(3)


REFUSED = {
    "path.rule=[secant,left,secant]": "path.rule=[secant,left,secant]: give each rule once",
    "path.queries=[]": "path.queries=[]: the network must be read somewhere",
    "path.queries=[train,train]": "path.queries=[train,train]: give each split once",
    "path.outputs=[]": "path.outputs=[]: give one or more, each once",
    "path.outputs=[0,0]": "path.outputs=[0, 0]: give one or more, each once",
    "path.outputs=[3]": "path.outputs",
    "path.outputs=[-1]": "path.outputs",
    "kernel.sketch=5": "kernel.sketch=5: kernels along a path are exact",
    "path.by={a: ['x*']}": "path.by: 'x*' of 'a' matches no trained parameter",
    "path.by=module path.every=snapshots": "path.by=module: snapshots interpolate",
    "path.by=parameter data.train=100 data.query=100 memory_gb=0.61": "name fewer components by path.by",
} | {
    f"{way} path.kernels={kept}": f"path.kernels={kept}: "
    for way in ("optimizer=adam", "optimizer=flow path.rule=[gauss]", "path.every=snapshots")
    for kept in ("none", "trace")
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_impossible_part_is_refused_in_one_line(words: str) -> None:
    with pytest.raises(Mistake) as refusal:
        prepare(small("data.classes=[1,3,8]", *re.split(r" (?=\w+[.=])", words)))
    assert REFUSED[words] in str(refusal.value)


KEYS_OF_QUESTIONS = (("path.kernels", "auto", "all", "trace", "none"), ("path.by", "null", "module", "parameter"))


def test_another_question_is_another_run_but_the_default_is_none() -> None:
    for key, default, *others in KEYS_OF_QUESTIONS:
        plain, same, *different = (identity(small(*w)) for w in ((), *((f"{key}={v}",) for v in (default, *others))))
        assert plain == same
        assert len({plain, *different}) == 1 + len(others)


def test_components_change_only_the_order_of_sums() -> None:
    split, whole = (ran(*SHORT, *more).contributions("secant") for more in (("path.by=parameter",), ()))
    assert (split - whole).abs().max() <= 100 * torch.finfo(torch.float64).eps * whole.abs().max()


def test_the_rest_is_the_remaining_parameters() -> None:
    named = "{first: [network.1.*], rest: ['*']}"
    some, every = (ran(*SHORT, f"path.by={by}").outcome.by_component["secant"] for by in (named, "module"))
    assert list(some.components) == ["first", "rest"]
    assert torch.equal(some.parts[..., 0], every.parts[..., list(every.components).index("network.1")])


# Traces over outputs equal the traces of kernels, without arrays for pairs of outputs.


TRACED = ("steps=2", "path.rule=[secant]", "optimizer.step_size=0.1", "path.error_samples=0")
CLASSES = ("data.classes=[1,3,8]", "loss=cross_entropy")


@pytest.mark.parametrize("at_once", [reading.OUTPUT_GRADIENT_BYTES, 1.0], ids=["all outputs at once", "one by one"])
def test_what_is_kept_is_the_trace_of_the_kernel(at_once: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ran(*TRACED, *CLASSES)
    monkeypatch.setattr(reading, "OUTPUT_GRADIENT_BYTES", at_once)
    some = ran(*TRACED, *CLASSES, "path.kernels=trace", "memory_gb=2")
    assert some.memory.kernels.keys() == whole.memory.kernels.keys()
    traces = {step: kernel.diagonal(dim1=1, dim2=3).sum(2) for step, kernel in whole.memory.kernels.items()}
    train = whole.setting.points.train
    for step, expected in traces.items():
        found = some.memory.kernels[step][:, 0, :, 0]
        assert float((found - expected).norm() / expected.norm()) < ROUNDING
        row, full = some.memory.rows[step], whole.memory.rows[step]
        assert row["trace"] == pytest.approx(full["trace"], rel=ROUNDING)
        assert row["kernel_change"] == pytest.approx(kernel_change(expected[:train], traces[0][:train]), abs=ROUNDING)
        assert row["label_alignment"] == pytest.approx(full["label_alignment"], rel=ROUNDING)
        assert row["lambda_max"] == pytest.approx(full["lambda_max"], rel=1e-6)  # by products with vectors, from below
        largest = torch.linalg.eigvalsh(expected[:train])[-1]
        assert row["eigenvalue_1"] == pytest.approx(float(largest), rel=ROUNDING)


def test_the_distance_to_infinite_width_is_one_of_traces() -> None:
    asked = (*TRACED, "data.classes=[1,3,8]", "ladder.machine=[frozen_limit]")
    some, whole = (ran(*asked, f"path.kernels={kept}") for kept in ("trace", "all"))
    train, limit = whole.setting.points.train, whole.outcome.matrices.limit_kernels.tangent
    trace = whole.memory.kernels[0].diagonal(dim1=1, dim2=3).sum(2)[:train]
    expected = kernel_change(trace, 3 * limit[:train])
    assert some.memory.rows[0]["limit_distance"] == pytest.approx(expected, rel=1e-10)


def test_shares_of_the_residual_are_those_in_the_modes_of_the_trace() -> None:
    some = ran(*TRACED, *CLASSES, "path.kernels=trace")
    train = some.setting.points.train
    residual = some.setting.start.outputs[:train] - some.setting.problem.targets[:train]
    top = torch.linalg.eigh(some.memory.kernels[0][:train, 0, :, 0])[1][:, -5:]
    expected = float((top.mT @ residual).square().sum() / residual.square().sum())
    assert some.memory.rows[0]["residual_top_5"] == pytest.approx(expected, rel=1e-9)


# Contributions alone: the same numbers, and nothing is made that is as large as a kernel of all pairs of outputs.


KERNEL_FREE = ("steps=4", "path.rule=[secant,left]")
KERNEL_FREE_WAYS = (
    ("optimizer=gd", "path.error_samples=2"),
    ("optimizer=sgd", "optimizer.weight_decay=0.1", "optimizer.layers={network.1: 0.25}"),
    ("optimizer=gd", "path.outputs=[2,0]", "path.substeps=2"),
)
STEP = "optimizer.step_size=0.1"  # of those chosen by the kernel, one is from products with vectors
SUMS_ROUNDING = 1e-12  # sums over outputs before products with the query's features, over 4 steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", KERNEL_FREE_WAYS, ids=" ".join)
def test_contributions_are_those_of_kernels(way: tuple[str, ...]) -> None:
    some, whole = (ran(*KERNEL_FREE, *CLASSES, *way, STEP, f"path.kernels={kept}") for kept in ("none", "all"))
    for rule, path in some.outcome.matrices.paths.items():
        expected = whole.outcome.matrices.paths[rule]
        torch.testing.assert_close(
            path.contributions,
            expected.contributions,
            rtol=0,
            atol=SUMS_ROUNDING * float(expected.contributions.nan_to_num().abs().max()),
            equal_nan=True,
        )
        assert path.facts.get("error_bar", 0.0) == pytest.approx(expected.facts.get("error_bar", 0.0), rel=1e-6)
    assert some.table["secant", "query"].relative_error == pytest.approx(0, abs=1e-12)
    assert some.memory.kernels == {}
    assert "path.kernels=all" in some.table["frozen_start", "train"].note


SUMS = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=23", "loss=cross_entropy", "model.width=4")
LARGE = (*SUMS, "data.train=90", "data.query=3", "data.test=0")  # 90 examples × 23 outputs > 2048
CHOSEN_KERNELS = {
    "few entries": ((*SUMS, "data.train=80", "data.query=3", "data.test=0"), "all"),
    "many entries": (LARGE, "trace"),
    "one output": (("data.train=300", "data.query=1", "data.test=0", "model.width=4"), "all"),
    "all, as asked": ((*LARGE, "path.kernels=all"), "all"),
    "none, as asked": ((*LARGE, "path.kernels=none"), "none"),
    "snapshots need them": ((*LARGE, "path.every=snapshots"), "all"),
    "Adam needs them": ((*LARGE, "optimizer=adam", "optimizer.step_size=0.01"), "all"),
    "a diagnostic needs them": ((*LARGE, "diagnostics=[kernel_velocity]"), "all"),
}


@pytest.mark.parametrize(("words", "expected"), CHOSEN_KERNELS.values(), ids=CHOSEN_KERNELS)
def test_kernels_of_many_outputs_are_stored_as_traces(words: tuple[str, ...], expected: str) -> None:
    chosen = survey(small(*words))
    assert chosen.points.kernels == chosen.experiment.path.kernels == expected
    assert chosen.chose_traces == (expected == "trace")


def test_the_sentence_of_a_run_names_the_key_that_stores_all_kernels() -> None:
    traced = ran(*LARGE, "steps=1", "path.rule=[secant]", "ladder.machine=[secant]")
    assert "path.kernels=all stores all" in traced.outcome.sentence


class Largest(DispatchMode):
    """Watches how many numbers the largest tensor has that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


def largest(*words: str) -> int:
    """Return the largest number of numbers in a tensor while a run takes two steps."""
    setting, listener = prepare(small("steps=2", "path.rule=[secant]", *words)), Memory()
    spy = Largest()
    with spy:
        train_steps(begin(setting, listener.trajectory), listener)
    return spy.numbers


@pytest.mark.slow
def test_nothing_grows_with_the_square_of_the_outputs() -> None:
    sizes = ("loss=cross_entropy", "data.train=60", "data.query=40", "data.test=0", "model.width=8")
    digits = (*sizes, "data.classes=all", "path.error_samples=2")
    assert largest(*digits, "path.kernels=none") < 60 * 40 * 10**2 <= largest(*digits, "path.kernels=all")
    sums = ("data=modular_addition", "data.encoding=one_hot", "path.outputs=[0,7]")
    traced = largest(*sizes, *sums, "data.modulus=41", "path.kernels=trace", "optimizer.step_size=0.1")
    assert traced < 60 * 100 * 41**2 / 4  # pairs of outputs have 10 million
    read_once = ("data.modulus=23", "data.train=99", "model.width=32", "path.kernels=none")
    assert largest(*sums, *read_once) < 99 * 23 * 32  # an output of each example pulled back, layer by layer


def test_the_largest_stable_step_is_found_without_a_kernel() -> None:
    none, whole = (ran("steps=1", f"path.kernels={kept}").setting.start for kept in ("none", "all"))
    assert none.largest_stable_step == pytest.approx(whole.largest_stable_step, rel=1e-6)


@pytest.mark.slow
def test_a_thousand_outputs_against_plain_jacobians() -> None:
    """By left ends, 𝒮 of one step is −η J(x) J(xᵢ)ᵀ ℓ′ᵢ; of three outputs, from whole Jacobians."""
    many = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=997", "loss=cross_entropy")
    some = ran(*many, "path.kernels=none", "path.rule=[left]", "steps=1", "model.width=8", "path.queries=[query]")
    setting, chosen = some.setting, [0, 7, 996]
    module, weights, inputs = setting.problem.module, setting.problem.weights, setting.problem.inputs[22:27]

    def jacobian(places: slice) -> Tensor:
        found = jacrev(lambda known: functional_call(module, known, (inputs[places],)))(weights)
        return torch.cat([part.flatten(2) for part in found.values()], dim=2)

    pulled = setting.descent.output_gradient(0, setting.start.outputs[:24])[22:]
    gradients = torch.einsum("ncp,nc->np", jacobian(slice(2)), pulled)
    expected = -setting.descent.step_size_at(0) * torch.einsum(
        "qcp,np->qcn", jacobian(slice(2, 5))[:, chosen], gradients
    )
    found = some.contributions("left")[:3, chosen, 22:]
    assert float((found - expected).norm() / expected.norm()) < SUMS_ROUNDING
