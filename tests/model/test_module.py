"""Modules as strangers write them: what fits is exact, what does not is said in one line."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from ntkexp.config.compose import compose
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import identity
from ntkexp.mistake import Mistake
from ntkexp.run.setting import prepare
from tests.model.unfit import UNFIT
from tests.run.small import ran, small
from tests.run.test_exactness import assert_exact

FEW = ("data.train=4", "data.probe=2", "data.test=2", "steps=3", "model.width=8", "ladder.machine=[secant]")
Write = Callable[[str], Path]

FITTING = {
    "a convolutional net with max pooling": """
        class build(nn.Module):
            def __init__(self, shape, outputs):
                super().__init__()
                self.one, self.two = nn.Conv2d(shape[0], 4, 3, padding=1), nn.Conv2d(4, 6, 3)
                self.drop, self.last = nn.Dropout2d(), nn.Linear(6, outputs)

            def forward(self, x):
                x = F.max_pool2d(F.relu(self.one(x)), 2)
                x = F.relu(F.max_pool2d(self.drop(self.two(x)), 2))
                return self.last(F.dropout(x, training=self.training).view(x.size(0), -1))
        """,
    "an LSTM on rows, its first state made by hand": """
        class build(nn.Module):
            def __init__(self, width, outputs):
                super().__init__()
                self.width, self.cells = width, nn.LSTM(8, width, batch_first=True)
                self.last = nn.Linear(width, outputs)

            def forward(self, x):
                x = x.squeeze(1)[:, :3]
                start = torch.zeros(1, len(x), self.width)
                return self.last(self.cells(x, (start, start))[0][:, -1])
        """,
    "single precision in weights and buffers": """
        class build(nn.Module):
            def __init__(self):
                super().__init__()
                self.last = nn.Linear(64, 1, dtype=torch.float32)
                self.register_buffer("mean", torch.full((64,), 0.5, dtype=torch.float32))

            def forward(self, x):
                return torch.tanh(self.last(x.flatten(1) - self.mean))
        """,
    "one output without an axis": """
        class build(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.last = nn.Linear(64, 5), nn.Linear(5, 1)

            def forward(self, x):
                return self.last(F.relu(self.hidden(x.flatten(1)))).squeeze(1)
        """,
    "sizes found at the first call": """
        def build(outputs):
            return nn.Sequential(nn.Flatten(), nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(outputs))
        """,
    "a weight that is never used": """
        class build(nn.Module):
            def __init__(self):
                super().__init__()
                self.spare, self.last = nn.Linear(3, 3), nn.Linear(64, 1)

            def forward(self, x):
                return self.last(x.flatten(1)).sin()
        """,
    "weights drawn from the seed": """
        import numpy as np

        def build(seed, *, width, steepness=2.0):
            drawn = torch.tensor(np.random.default_rng(seed).normal(size=(width, 64)) / 8)
            first = nn.Linear(64, width)
            first.weight.data = drawn
            return nn.Sequential(nn.Flatten(), first, nn.SiLU(), nn.Linear(width, 1))
        """,
}


def experiment(file: Path, *overrides: str) -> Experiment:
    """A small experiment with the module that `build` in this file gives."""
    return small(*FEW, "model=module", f"model.path={file}:build", *overrides, trust=[str(file)])


READINGS = ("init.alpha=1", "init.centred=true", "init.antisymmetric=true")
READ = [
    pytest.param(name, reading, marks=() if row % len(READINGS) == column else pytest.mark.slow)
    for (row, name), (column, reading) in product(enumerate(FITTING), enumerate(READINGS))
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "reading"), READ)
def test_a_module_is_trained_exactly(name: str, reading: str, written: Write) -> None:
    file = written(FITTING[name])
    run = ran(*FEW, "model=module", f"model.path={file}:build", reading, trust=[str(file)])
    assert_exact(run)


def test_tied_tables_of_tokens_are_one_weight(written: Write) -> None:
    file = written("""
        class build(nn.Module):
            def __init__(self, vocabulary, outputs, shape):
                super().__init__()
                self.table, self.mix = nn.Embedding(vocabulary, 4), nn.Linear(4, 4)
                self.last = nn.Linear(4, vocabulary, bias=False)
                self.last.weight = self.table.weight

            def forward(self, x):
                return self.last(torch.tanh(self.mix(self.table(x).mean(1))))
        """)
    model = ("model=module", f"model.path={file}:build", "data=modular_addition", "data.modulus=3")
    run = ran(*FEW, *model, trust=[str(file)])
    assert [weight.shape for weight in run.setting.problem.weights.values()] == [(3, 4), (4, 4), (4,)]
    assert_exact(run)


@pytest.mark.parametrize("more", [(), ("path.effects=derivative",)], ids=["parts", "effects"])
@pytest.mark.parametrize("sparse", [False, True], ids=["whole gradients", "sparse gradients"])
def test_tokens_come_as_whole_numbers(sparse: bool, more: tuple[str, ...], written: Write) -> None:
    file = written(f"""
        class build(nn.Module):
            def __init__(self, vocabulary, outputs):
                super().__init__()
                self.table, self.last = nn.Embedding(vocabulary, 4, sparse={sparse}), nn.Linear(8, outputs)

            def forward(self, x):
                assert x.dtype == torch.int64
                return self.last(self.table(x).flatten(1).relu())
        """)
    model = ("model=module", f"model.path={file}:build", "data=modular_addition", "data.modulus=3")
    assert_exact(ran(*FEW, *model, *more, trust=[str(file)]))


def test_a_gradient_divided_by_how_often_a_batch_has_a_row_trains_no_run(written: Write) -> None:
    file = written("""
        def build(vocabulary, outputs):
            table = nn.Embedding(vocabulary, 4, scale_grad_by_freq=True)
            return nn.Sequential(table, nn.Flatten(), nn.Linear(8, outputs))
        """)
    model = ("model=module", f"model.path={file}:build", "data=modular_addition", "data.modulus=3")
    with pytest.raises(Mistake, match=r"0\.weight' is divided by how often a batch has each row"):
        ran(*FEW, *model, trust=[str(file)])


def test_a_seed_is_a_draw_and_another_seed_another(written: Write) -> None:
    """Torch's own generator is left as it was."""
    file = written("def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))")
    before = torch.get_rng_state()
    one, same, other = (prepare(experiment(file, "data.seed=0", f"seed={seed}")).problem.weights for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("text", "words"), UNFIT.items(), ids=UNFIT.values())
def test_what_does_not_fit_is_said_in_one_line(text: str, words: str, written: Write) -> None:
    with pytest.raises(Mistake, match=words) as caught:
        prepare(experiment(written(text)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("wirtten.py:build", r"there is no file .*wirtten\.py.*; did you mean '.*written.*'\?"),
        ("written.py", r"written\.py is Python code of yours, which runs only if you say so$"),
        ("written.py:", r"it takes FILE\.py:FUNCTION"),
        ("written.txt:build", r"it takes FILE\.py:FUNCTION"),
    ],
)
def test_a_file_has_to_be_there_and_to_be_trusted(path: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "written.py").write_text("raise AssertionError('this must not run')")
    with pytest.raises(Mistake, match=words):
        compose(["model=module", f"model.path={tmp_path}/{path}"])


def test_trusting_another_file_or_a_package_elsewhere_does_not_help(written: Write) -> None:
    trusted, other = written("def build(): ..."), written("1 / 0")
    with pytest.raises(Mistake, match="which runs only if you say so"):
        compose(["model=module", f"model.path={other}"], trust=[str(trusted), "json"])


def test_the_file_and_what_it_imports_beside_it_count(written: Write) -> None:
    beside = written("WIDTH = 3")
    file = written(f"from {beside.stem} import WIDTH\ndef build():\n    return nn.Linear(64, WIDTH)")
    found = [identity(experiment(file)), identity(experiment(file))]
    beside.write_text("WIDTH = 4")
    found.append(identity(experiment(file)))
    file.write_text(file.read_text() + "\n")
    found.append(identity(experiment(file)))
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_chance_that_no_seed_rules_is_found(written: Write) -> None:
    file = written("""
        import random

        def build():
            last = nn.Linear(64, 1)
            last.bias.data[0] = random.random()
            return nn.Sequential(nn.Flatten(), last)
        """)
    with pytest.raises(Mistake, match=r"draws another '1\.bias' when it is called again with the same seed"):
        prepare(experiment(file))
