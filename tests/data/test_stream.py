"""Chance comes through one door, and no two purposes share a number."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.overrides import TorchFunctionMode

import ntkexp
from ntkexp.config.compose import compose
from ntkexp.data.base import AbstractSource, Data
from ntkexp.data.synthetic import Sphere
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import draw_network
from ntkexp.init import NTK
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.networks import MLP
from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.run.setting import prepare
from ntkexp.stream import Purpose, stream
from tests.config.components import choices, configured, networks
from tests.data.conftest import READY, source_of

PACKAGE = Path(ntkexp.__file__).parent
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
FROM_LIBRARIES = {"huggingface", "timm"}  # drawn by torch's own generator, which `adapted` starts at the same place


class Overheard(TorchFunctionMode):
    """Where the generators started by which tensors are drawn."""

    def __init__(self) -> None:
        self.starts: set[int] = set()
        super().__init__()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None:
            self.starts.add(generator.initial_seed())
        elif torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, func.__name__, None), "tags", ()):
            self.starts.add(torch.initial_seed())
        return func(*args, **(kwargs or {}))


def overheard(draw: Callable[[], object]) -> frozenset[int]:
    with Overheard() as found:
        draw()
    return frozenset(found.starts)


@cache
def of_data(name: str) -> frozenset[int]:
    """A source's examples, their order and their noise, at seed 0."""
    source: AbstractSource = source_of(name, train=8, probe=4, test=4, label_noise=0.5)
    return overheard(lambda: source.split(0))


def epochs(optimizer: AbstractOptimizer) -> None:
    """The batches of two epochs."""
    for step in range(8):
        optimizer.batch_indices(step, 8, 0)


@cache
def of_batches() -> frozenset[int]:
    """Every optimizer's first epochs, at seed 0."""
    found: frozenset[int] = frozenset()
    for name, replacement in product(choices("optimizer"), (False, True)):
        optimizer = configured("optimizer", name)
        assert isinstance(optimizer, AbstractOptimizer)
        if "batch" in type(optimizer).model_fields:
            found |= overheard(partial(epochs, optimizer.model_copy(update={"batch": 2, "replacement": replacement})))
    return found


@cache
def usual() -> tuple[Experiment, Data]:
    """The default experiment, on few data."""
    experiment = compose(["data.train=8", "data.probe=2", "data.test=2"])
    return experiment, experiment.data.split()


@pytest.mark.parametrize("name", sorted(set(networks()) - FROM_LIBRARIES))
def test_no_network_draws_what_data_or_batches_draw(name: str) -> None:
    model = configured("model", name, width=8)
    assert isinstance(model, AbstractArchitecture)
    experiment, data = usual()
    weights = overheard(lambda: draw_network(experiment.model_copy(update={"model": model}), data, 1))
    assert weights
    others = [of_batches(), *map(of_data, READY)]
    assert [found for found in others if found & weights] == []
    assert all(others)


def test_batches_are_drawn_apart_from_data() -> None:
    assert len(of_batches()) > 3
    assert [name for name in READY if of_data(name) & of_batches()] == []


def test_examples_their_order_and_their_noise_are_drawn_apart() -> None:
    assert len(of_data("sphere")) == 3


def test_no_two_streams_share_a_number() -> None:
    streams = [stream(purpose, seed) for purpose in PURPOSES for seed in (0, 1, 2, 3, 2**32, 2**40 - 1)]
    streams += [stream("batches", 0, epoch) for epoch in range(20)]
    drawn = torch.stack([torch.randn(200, generator=each, dtype=torch.float64) for each in streams])
    assert len(set(drawn.flatten().tolist())) == drawn.numel()
    correlation = drawn.corrcoef().fill_diagonal_(0)
    # 2,000 correlations of deviation 1/√200: the largest of so many normal numbers is about 3.5 of these
    assert correlation.abs().max() < 5 * 200**-0.5


def test_a_thousand_seeds_are_a_thousand_streams() -> None:
    starts = Counter(stream(purpose, seed).initial_seed() for purpose in PURPOSES for seed in range(1000))
    assert max(starts.values()) == 1


def test_what_is_to_be_learned_has_nothing_to_do_with_the_first_unit() -> None:
    cosines = []
    for seed in range(40):
        data = Sphere(train=20, probe=0, test=0, degree=1, standardise="none").split(seed).train
        direction = torch.linalg.lstsq(data.inputs, data.target - data.target.mean()).solution[:, 0]
        student = MLP(width=8).module(NTK(W_std=1, b_std=0), (10,), 1, stream("weights", seed))
        cosines.append(cosine_similarity(direction, next(student.parameters())[0], dim=0))
    # a cosine in ten dimensions has a deviation of 1/√10, the mean of 40 one of 0.05
    assert torch.stack(cosines).mean().abs() < 4 * 400**-0.5


def test_data_follow_the_seed_unless_they_have_their_own() -> None:
    small = ("data=moons", "data.train=8", "data.probe=2", "data.test=2", "model.width=8")
    own = ("seed=1", "data.seed=0")
    first, followed, apart = (prepare(compose([*small, *words])) for words in (("seed=0",), ("seed=1",), own))
    assert torch.equal(first.problem.data.train.inputs, apart.problem.data.train.inputs)
    assert not torch.equal(first.problem.data.train.inputs, followed.problem.data.train.inputs)
    assert all(
        torch.equal(followed.problem.weights[name], apart.problem.weights[name]) for name in first.problem.weights
    )


def doors(tree: ast.AST) -> list[str]:
    """Names by which chance is reached."""
    names = (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(tree))
    return [name for name in names if name in {"manual_seed", "default_rng", "RandomState", "seed_all", "SystemRandom"}]


def test_chance_has_one_door() -> None:
    found = {
        str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if doors(ast.parse(file.read_text("utf-8")))
    }
    # `adapted` starts torch's own generator where that of the weights starts; `synthetic` invents tables, not results
    assert found == {"stream.py", "model/foreign.py", "claim/judge.py"}


def test_every_purpose_is_asked_for_in_one_file() -> None:
    """Trials of claims are experiments of their own: each draws its networks as a run draws its own."""
    trials = PACKAGE / "claim" / "papers"
    asked = Counter(
        purpose
        for file in PACKAGE.rglob("*.py")
        if file.name != "stream.py" and trials not in file.parents
        for purpose in set(re.findall(r'\bstream\("([\w ]+)"', file.read_text("utf-8")))
    )
    own = Counter({"cue": 1, "left out": 1})  # that trials alone ask for
    assert asked + own == Counter(PURPOSES)
