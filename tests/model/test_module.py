"""Modules of users in files: those that fit are trained exactly, the others are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ntkexp.config.build import load_function
from ntkexp.config.compose import compose
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import identity
from ntkexp.library import finite_step_kernel, secant_kernel, tangent_kernel
from ntkexp.model.functional import function_of
from ntkexp.run.setting import prepare, survey
from ntkexp.shapes import Weights
from tests.kernel.networks import Formula, drawn
from tests.kernel.oracle import agree, normal, refused
from tests.run.small import Ran, ran, small
from tests.run.test_exactness import assert_exact


def built(module: str) -> str:
    """Return a function that returns this, in its second line."""
    return f"def build():\n    return {module}"


def forward(*lines: str, arguments: str = "x") -> str:
    """Return a module of one layer with these lines in its forward, from line 9 on."""
    body = "".join(f"        {line}\n" for line in lines)
    return (
        "class build(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.layer = nn.Linear(64, 1)\n    def forward(self, {arguments}):\n{body}"
    )


UNFIT = {
    "1 / 0": r"\.py, line 4: ZeroDivisionError: division by zero",
    "raise SystemExit(3)": r"line 4: SystemExit",
    "def build(": r"line 4: SyntaxError",
    "import nowhere_to_be_found": r"line 4: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    "def biuld(): ...": r"there is no function build in the file; it has biuld; did you mean 'biuld'\?",
    "x = 1": r"there is no function build in the file; it has no function",
    "build = 3": r"build is a int, and a function is expected",
    "build = nn.Linear(64, 1)": r"build is a module, whose weights the seed cannot draw",
    "async def build(): ...": r"build is async; write `def` in place of `async def`",
    "def build(hidden): ...": r"needs an argument 'hidden', which is none of shape, outputs, width, seed, vocabulary",
    "def build(): ...": r"returns a NoneType; let it return an nn\.Module",
    built("nn.Linear(1, 'one')"): r":build, line 5: TypeError",
    built("nn.Flatten()"): r"nothing to train: it has no parameters",
    built("nn.Linear(8, 1).requires_grad_(False)"): r"none of its 2 parameters requires gradients",
    built("nn.Linear(8, 1, dtype=torch.complex64)"): r"'weight' is complex",
    "def build():\n    layer = nn.Linear(64, 1)\n    layer.bias.register_hook(torch.sign)\n    return layer": (
        r"the parameter 'bias' has a hook, which a run would not call"
    ),
    built("nn.Linear(7, 1)"): r"shape \[1, 8, 8\], and the module says: RuntimeError: mat1 and mat2 shapes",
    built(
        "nn.Linear(8, 1)"
    ): r"shape \[2, 1, 8, 1\] for 2 examples, but data and loss need \[2, 1\]; let it return 1 output for",
    built("nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"): r"shape \[2, 10\].*need \[2, 1\]",
    built("nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten())"): (
        r"layer '0' \(BatchNorm2d, track_running_stats=False\) takes its statistics from the batch, "
        r"even after module\.eval\(\)"
    ),
    "class build(nn.Sequential):\n    def __init__(self):\n"
    "        super().__init__(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 1))\n"
    "    def train(self, mode=True):\n        return super().train(True)": (
        r"layer '1' \(Dropout, p=0\.1\) is random in training mode, even after module\.eval\(\)"
    ),
    forward("return x.nonsense"): r"and the module says, line 9: AttributeError",
    forward("return 1", arguments="x, y"): r"missing 1 required positional argument: 'y'",
    forward("return self.layer(x.flatten(1) + torch.ones(3))"): r"and the module says, line 9: RuntimeError",
    forward("return {'y': self.layer(x.flatten(1))}"): r"returns a dict; let it return one tensor",
    forward("return self.layer(x.flatten(1)).long()"): r"gives torch\.int64, and real numbers are expected",
    forward("return self.layer(F.dropout(x).flatten(1))"): r"dropout without training=self\.training",
    forward("x = F.embedding((x[:, 0, 0, :4] > 1e9).long(), self.layer.weight, sparse=True)", "return x.sum((1, 2))"): (
        r"there is a sparse gradient"
    ),
    forward("x -= 1", "return self.layer(x.flatten(1))"): r"overwrites its inputs",
    forward("return self.layer(x.flatten(1)).detach()"): r"is there a detach, or no_grad\?",
    forward("return self.layer((x - x.mean(0)).flatten(1))"): r"couples the examples",
    forward("return self.layer(x.flatten(1)) / 0"): r"not finite.*; look at how the module draws its weights",
    forward("return F.relu(self.layer(x.flatten(1)) - 1e3)"): r"are all units dead",
}


# Modules as users write them.


FEW = ("data.train=4", "data.query=2", "data.test=2", "steps=3", "model.width=8", "ladder.machine=[secant]")
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
    """Return a small experiment with the module that `build` in this file gives."""
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


MODULAR = ("data=modular_addition", "data.modulus=3")


def of_tokens(written: Write, text: str, *more: str) -> Ran:
    """Run a module on tokens."""
    file = written(text)
    return ran(*FEW, "model=module", f"model.path={file}:build", *MODULAR, *more, trust=[str(file)])


def test_tied_tables_of_tokens_are_one_weight(written: Write) -> None:
    text = """
        class build(nn.Module):
            def __init__(self, vocabulary, outputs, shape):
                super().__init__()
                self.table, self.mix = nn.Embedding(vocabulary, 4), nn.Linear(4, 4)
                self.last = nn.Linear(4, vocabulary, bias=False)
                self.last.weight = self.table.weight

            def forward(self, x):
                return self.last(torch.tanh(self.mix(self.table(x).mean(1))))
        """
    run = of_tokens(written, text)
    assert [weight.shape for weight in run.setting.problem.weights.values()] == [(3, 4), (4, 4), (4,)]
    assert_exact(run)


@pytest.mark.parametrize("more", [(), ("path.effects=derivative",)], ids=["parts", "effects"])
@pytest.mark.parametrize("sparse", [False, True], ids=["whole gradients", "sparse gradients"])
def test_tokens_come_as_whole_numbers(sparse: bool, more: tuple[str, ...], written: Write) -> None:
    text = f"""
        class build(nn.Module):
            def __init__(self, vocabulary, outputs):
                super().__init__()
                self.table, self.last = nn.Embedding(vocabulary, 4, sparse={sparse}), nn.Linear(8, outputs)

            def forward(self, x):
                assert x.dtype == torch.int64
                return self.last(self.table(x).flatten(1).relu())
        """
    assert_exact(of_tokens(written, text, *more))


def test_a_gradient_divided_by_how_often_a_batch_has_a_row_trains_no_run(written: Write) -> None:
    text = """
        def build(vocabulary, outputs):
            table = nn.Embedding(vocabulary, 4, scale_grad_by_freq=True)
            return nn.Sequential(table, nn.Flatten(), nn.Linear(8, outputs))
        """
    with refused(r"0\.weight' is divided by the frequency of each row"):
        of_tokens(written, text)


def test_a_seed_is_a_draw_and_another_seed_another(written: Write) -> None:
    """Torch's generator stays unchanged."""
    file = written("def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))")
    before = torch.get_rng_state()
    one, same, other = (prepare(experiment(file, "data.seed=0", f"seed={seed}")).problem.weights for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("text", "words"), UNFIT.items(), ids=UNFIT.values())
def test_a_module_that_does_not_fit_is_refused(text: str, words: str, written: Write) -> None:
    with refused(words):
        prepare(experiment(written(text)))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("wirtten.py:build", r"there is no file .*wirtten\.py.*; did you mean '.*written.*'\?"),
        ("written.py", r"written\.py is your own Python code, which runs only if you trust it$"),
        ("written.py:", r"it takes FILE\.py:FUNCTION"),
        ("written.txt:build", r"it takes FILE\.py:FUNCTION"),
    ],
)
def test_a_file_has_to_be_there_and_to_be_trusted(path: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "written.py").write_text("raise AssertionError('this must not run')")
    with refused(words):
        compose(["model=module", f"model.path={tmp_path}/{path}"])
    with refused(rf"^measure\b.*{words}"):  # a function that an option of a command names
        load_function(f"{tmp_path}/{path}", "measure", ())


def test_trusting_another_file_or_a_package_elsewhere_does_not_help(written: Write) -> None:
    trusted, other = written("def build(): ..."), written("1 / 0")
    with refused("which runs only if you trust it"):
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
    with refused(r"draws another '1\.bias' when it is called again with the same seed"):
        prepare(experiment(file))


# Runs of modules whose values decide which row goes where are exact, and equal in blocks of any size.


ROUNDING = 1e-12  # sums of products in another order, through six steps
FEW_ROWS = (
    *("data.train=12", "data.query=6", "data.test=6", "steps=6", "path.count=2", "path.rule=[secant]"),
    *("ladder.machine=[secant]", "model=module"),
)
ROWS = """
    class build(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, outputs)

        def forward(self, x):
            x = x[:, 0]
            return self.outer(self.summed(x, x.mean(2) > 0.3))
    """

NETS = {
    "sorted rows": f"""{ROWS}
        def summed(self, x, mask):
            order = x.sum((1, 2)).argsort()
            return torch.tanh(self.inner(x[order])).sum(1)[order.argsort()]
    """,
    "packed padding": f"""{ROWS}
        def summed(self, x, mask):
            room = x.new_zeros(*x.shape[:2], 4)
            room[mask] = torch.tanh(self.inner(x[mask]))
            return room.sum(1)
    """,
    "lengths read by Python": f"""{ROWS}
        def summed(self, x, mask):
            parts = torch.tanh(self.inner(x[mask])).split(mask.sum(1).tolist())
            return torch.stack([part.sum(0) for part in parts])
    """,
    "the last position that counts": f"""{ROWS}
        def summed(self, x, mask):
            return torch.tanh(self.inner(x))[torch.arange(len(x)), (mask.sum(1) - 1).clamp(min=0)]
    """,
    "experts": """
    class build(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.router, self.experts = nn.Linear(64, 3), nn.ModuleList(nn.Linear(64, outputs) for _ in range(3))

        def forward(self, x):
            x = x.flatten(1)
            chosen, mixed = self.router(x).argmax(1), x.new_zeros(len(x), self.experts[0].out_features)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                mixed = mixed.index_add(0, rows, torch.tanh(expert(x[rows])))
            return mixed
    """,
}


def in_blocks(file: Path, block: int | None) -> Ran:
    """Run with memory for blocks of this many points, or of all."""
    model = (*FEW_ROWS, f"model.path={file}:build")
    if block is None:
        return ran(*model, trust=[str(file)])
    budget = survey(small(*model, trust=[str(file)])).memory
    memory = (budget.fixed + (2 * block + 1) * budget.per_point) / 1e9
    found = ran(*model, f"memory_gb={memory:.12f}", trust=[str(file)])
    assert found.setting.points.block == block
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sorted rows" else pytest.mark.slow) for name in NETS]
)
def test_a_run_is_exact_whatever_the_block(name: str, written: Callable[[str], Path]) -> None:
    file = written(NETS[name])
    whole, cut = in_blocks(file, None), in_blocks(file, 7)
    for run in (whole, cut):
        assert_exact(run)
    agree(cut.outcome.matrices.kernel_end, whole.outcome.matrices.kernel_end, ROUNDING)
    agree(cut.contributions("secant"), whole.contributions("secant"), ROUNDING)


# A module as a function: it stays unchanged, and the outputs of an example do not depend on the others.


X = torch.tensor([[0.3, -1.0], [2.0, 0.5]], dtype=torch.float64)
Read = Callable[[nn.Module, Weights], object]
READERS: dict[str, Read] = {
    "function": lambda module, weights: function_of(module)(weights, X),
    "tangent": lambda module, weights: tangent_kernel(module, X, weights=weights),
    "secant": lambda module, weights: secant_kernel(module, {}, weights, X, X),
}


def with_a_layer_twice() -> nn.Sequential:
    """Its tensors have two names each."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
        return nn.Sequential(layer, layer, nn.Linear(2, 1)).double().eval()


def moved(module: nn.Module) -> Weights:
    """Other weights."""
    return {name: weight.detach() + 0.5 for name, weight in module.named_parameters()}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_layer_that_stands_twice_in_a_module_keeps_its_own_tensors(read: Read) -> None:
    module = with_a_layer_twice()
    before = [*module.parameters(), *module.buffers()]
    read(module, moved(module))
    assert all(one is other for one, other in zip([*module.parameters(), *module.buffers()], before, strict=True))


def tokens(x: Tensor, patches: nn.Module, norm: nn.Module, head: nn.Module) -> Tensor:
    """Pixels of normalised images one after another, so that their gradient comes back with channels last."""
    found = torch.asinh(norm(patches(x))).flatten(2).transpose(1, 2)
    outputs: Tensor = head(found.flatten(1))
    return outputs


@pytest.mark.parametrize("affine", [True, False])
def test_one_image_alone_has_the_kernel_that_it_has_among_others(affine: bool) -> None:
    """torch itself goes back wrongly there."""
    layers = {"patches": nn.Conv2d(1, 3, 3), "norm": nn.BatchNorm2d(3, affine=affine), "head": nn.Linear(27, 2)}
    module, x = drawn(Formula(tokens, **layers)).eval(), normal(2, 1, 5, 5)
    together = tangent_kernel(module, x)
    agree(tangent_kernel(module, x[:1], x), together[:1], 1e-14)
    agree(finite_step_kernel(module, x, x[:1], 1e-6), together[:, :, :1], 1e-4)  # up to the step


def test_weights_go_to_every_place_that_holds_them() -> None:
    module = with_a_layer_twice()
    bias = nn.Parameter(torch.tensor([0.3, -0.3], dtype=torch.float64))
    linear, norm, _ = module[0].children()
    linear.bias = norm.bias = bias
    there = deepcopy(module)
    with torch.no_grad():
        for weight in there.parameters():
            weight.add_(0.5)
    assert torch.equal(function_of(module)(moved(module), X), there(X))
