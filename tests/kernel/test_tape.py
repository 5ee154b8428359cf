"""Recording a module as it runs, and comparing its operations at both ends of a step."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.record.program import program
from ntkexp.kernel.record.recorder import Recorder, functional_twin
from ntkexp.kernel.secant.call import NoRule
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.shapes import Inputs
from tests.kernel import oracle
from tests.kernel.networks import Formula, drawn, drawn_formula, own_weights, scaled
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.kernel.problems import KINDS, known

X = normal(4, 3, seed=7)


@pytest.mark.parametrize("name", KINDS)
def test_a_tape_holds_the_outputs_and_has_one_structure_at_all_weights(name: str) -> None:
    network, step = known(name), known(name).step(0.3)
    expected = network.given.module(network.given.x).detach().reshape(len(network.given.x), -1)
    agree(network.tape.outputs, expected, 100 * EPS)  # attention runs by other kernels
    assert step.start.structure == step.end.structure
    assert step.start.program_digest == step.end.program_digest
    assert not any(entry.op._schema.is_mutable for entry in network.tape.entries)


def test_loops_are_unrolled() -> None:
    count = {name: len(known(name).tape.entries) for name in ("called twice", "called three times")}
    once_more = count["called three times"] - count["called twice"]
    assert once_more > 0
    assert count["called twice"] > 2 * once_more


def branching(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) if w.sum() > 0 else torch.tanh(x @ w) + 1


def test_a_branch_that_both_ends_take_is_read() -> None:
    made = drawn_formula(branching, w=(3, 2))
    end = {"w": made.get_parameter("w").detach() + 0.01}
    change = torch.func.functional_call(made, end, (X,)) - made(X)
    reader, own = reader_of(made)
    reading = reader.secant(reader.record(own, X), reader.record(end, X))
    # rounding of two outputs of size about one
    agree(reading.jvp, change.detach(), 100 * EPS, made(X).abs().max().detach())


@pytest.mark.parametrize(
    "function",
    [
        branching,
        lambda x, w: x @ w * float(w.sum()),
        lambda x, w: x @ w if w.sum() > 0 else x @ w[:, [0]].expand(-1, 2),
    ],
    ids=["a branch", "a number read into Python", "other shapes inside"],
)
def test_ends_that_differ_are_refused(function: Callable[..., Tensor]) -> None:
    made = drawn_formula(function, w=(3, 2))
    start = {"w": made.get_parameter("w").detach().abs()}
    with refused(kind=NoRule):
        secant_kernel(made, start, {"w": -start["w"]}, X, X)


AS_AUTOGRAD: dict[str, Callable[[], nn.Module]] = {
    "a number read into Python": lambda: drawn_formula(lambda x, w: x @ w * float(w.detach().sum()), w=(3, 2)),
    "rrelu in evaluation": lambda: nn.Sequential(nn.Linear(3, 4), nn.RReLU(0.1, 0.5), nn.Linear(4, 1)).eval(),
    "rrelu with its default slopes": lambda: nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 1)).eval(),
    "dropout and batch norm in evaluation": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), nn.Linear(4, 1)
    ).eval(),
}


@pytest.mark.parametrize("name", AS_AUTOGRAD)
def test_constants_of_a_tangent_are_those_of_autograd(name: str) -> None:
    made = AS_AUTOGRAD[name]().double()
    agree(tangent_kernel(made, X), oracle.tangent(made, X, X), 100 * EPS)


def training(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)).double()


def complex_weights() -> nn.Module:
    made = drawn_formula(lambda x, w: (x.to(w.dtype) @ w).abs(), w=(3, 2))
    made.w = nn.Parameter(torch.ones(3, 2, dtype=torch.complex128))
    return made


def left_in_training() -> nn.Module:
    made = training(nn.Dropout(0.2)).eval()
    made[1].train()  # type: ignore[index]  # a Sequential
    return made


RANDOM = r"draws random numbers \(aten\."
AXIS = "first axis must be the axis of examples"
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "dropout": (lambda x, w: nn.functional.dropout(x @ w, 0.5, training=True), RANDOM),
    "randn": (lambda x, w: x @ w + torch.randn(len(x), 2, dtype=x.dtype), RANDOM),
    "rand_like": (lambda x, w: x @ w * torch.rand_like(x[:, :2]), RANDOM),
    "bernoulli": (lambda x, w: x @ w + torch.bernoulli(torch.full((len(x), 2), 0.5, dtype=x.dtype)), RANDOM),
    "overwritten inputs": (lambda x, w: x.add_(1) @ w, "overwrites its inputs"),
    "a sum": (lambda x, w: (x @ w).sum(), AXIS),
    "transposed": (lambda x, w: (x @ w).t(), AXIS),
    "complex outputs": (lambda x, w: torch.complex(x @ w, x @ w), r"complex outputs.*torch\.view_as_real"),
}
MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{name: (partial(drawn_formula, function, w=(3, 2)), words) for name, (function, words) in REFUSED.items()},
    **{
        f"{type(layer).__name__} in training": (
            partial(training, layer),
            rf"layer '1' \({type(layer).__name__}.*module\.eval\(\)",
        )
        for layer in (nn.Dropout(0.2), nn.BatchNorm1d(4))
    },
    "batch statistics": (
        lambda: training(nn.BatchNorm1d(4, track_running_stats=False)),
        r"layer '1' \(BatchNorm1d.*module\.eval\(\)",
    ),
    "one layer left in training": (
        left_in_training,
        r"layer '1' \(Dropout, p=0\.2\) is random.*; call module\.eval\(\) first",
    ),
    "complex weights": (complex_weights, r"'w' is complex.*torch\.view_as_complex"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_without_a_fixed_function_of_examples_is_refused(name: str) -> None:
    make, words = MODULES[name]
    with refused(words):
        tangent_kernel(make(), X)


class Counting(nn.Module):
    """A module that counts its calls and keeps a running mean, in buffers."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        result: Tensor = self.layer(x)
        return result


def test_recording_leaves_the_module_as_it_is() -> None:
    made = Counting().double()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    tangent_kernel(made, X)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(weight.grad is None for weight in made.parameters())


def test_a_layer_without_units_carries_nothing() -> None:
    made = drawn_formula(lambda x, w, v, u: x @ w @ v + x @ u, w=(3, 0), v=(0, 2), u=(3, 2))
    agree(secant_kernel(made, {}, scaled(made, 1.5), X, X), oracle.tangent(made, X, X), 1e-14)


IN_PLACE = [
    op
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::") and schema.name.endswith("_") and not schema.name.endswith("__")
    for op in [getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")]
]


def test_a_write_in_place_has_a_twin_with_the_same_arguments() -> None:
    """For all operations of torch. A tensor is not a number, whatever the argument is called."""
    found = {op: twin for op in IN_PLACE if (twin := functional_twin(op)) is not None}
    assert len(found) > 200
    for op, twin in found.items():
        pairs = zip(op._schema.arguments, twin._schema.arguments, strict=True)
        assert all(one.name == other.name and one.type == other.type for one, other in pairs), (op, twin)


def test_a_program_keeps_the_last_operation_of_several_that_give_the_same() -> None:
    """The gates of an LSTM are parts of a tensor that was written in place, and parts of its storage as well."""
    tape = known("lstm").reader.record(known("lstm").given.start, known("lstm").given.x)
    pruned = tape.pruned()
    before, after = ({entry.name for entry in each.entries} for each in (tape, pruned))
    assert before - after >= {"index_copy", "index_select"}
    made = [slot for entry in pruned.entries for slot in entry.new_slots]
    assert len(made) == len(set(made))


@pytest.mark.parametrize(
    "write",
    [
        lambda h, k: h.clamp_min_(k),
        lambda h, k: h.clamp_(-k.abs(), k.abs()),
        lambda h, k: h.masked_fill_(h < 0, torch.tensor(0.5, dtype=h.dtype)),
        lambda h, k: h.pow_(2),
        lambda h, k: h.fill_(torch.tensor(2.0)),
        lambda h, k: h.lerp_(k, k),
    ],
)
def test_a_write_in_place_can_be_run_again(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    """By the program of its tape, without functionalize."""
    h, k = X, X.cos()
    with Recorder() as recorder:
        slots = [recorder.slot(value) for value in (h, k)]
        target = h * 1.0
        result = recorder.slot(write(target, k))
    again = program(recorder.entries, recorder.values, slots, [result]).run([h, k])
    assert torch.equal(again[0], target)


def test_examples_of_a_large_set_take_no_more_memory_than_others() -> None:
    layer = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double()
    reader, own = reader_of(layer)
    few = torch.zeros(1000, 2, 3, dtype=torch.float64)[:2]
    assert reader.record(own, few).bytes_per_example == reader.record(own, few.clone()).bytes_per_example == 8 * (6 + 4)


# Modules with several inputs, by position or by name, and with several outputs.


class Pair(NamedTuple):
    """A tuple with names."""

    logits: Tensor
    hidden: Tensor


@dataclass
class Answer:
    """Outputs, with other values that a network may return."""

    logits: Tensor
    cache: list[Tensor]
    loss: Tensor | None = None


class Several(nn.Module):
    """Tokens and a mask, with a switch; `form` is the type of the answer."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.form = form

    def forward(self, tokens: Tensor, mask: Tensor, double: bool = False) -> object:
        hidden = torch.tanh(self.mix(self.table(tokens))) * mask[..., None]
        logits: Tensor = self.head(hidden.sum(1)) * (2.0 if double else 1.0)
        forms: dict[str, object] = {
            "dict": {"logits": logits, "cache": [hidden]},
            "dataclass": Answer(logits, [hidden]),
            "tuple": (logits, hidden),
            "named tuple": Pair(logits, hidden),
            "tensor": logits,
            "nothing": None,
        }
        return forms[self.form]


def several(form: str = "tensor") -> nn.Module:
    """Return the network with the same random weights in every form."""
    return drawn(Several(form))


TOKENS = torch.tensor([[0, 3, 6], [1, 1, 2], [5, 4, 0], [2, 6, 6]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]]).double()


def expected(double: bool = False) -> Tensor:
    """Return the kernel of plain Jacobians, of the same network with one input."""
    joined = Formula(lambda x, inner: inner(x[:, :3].long(), x[:, 3:].double(), double), inner=several())
    x = torch.cat([TOKENS.double(), MASK], 1)
    return oracle.tangent(joined, x, x)


@pytest.mark.parametrize(
    ("inputs", "double"),
    [
        ((TOKENS, MASK), False),
        ((TOKENS, MASK, True), True),
        ({"tokens": TOKENS, "mask": MASK}, False),
        ({"tokens": TOKENS, "mask": MASK, "double": True}, True),
        (UserDict(tokens=TOKENS, mask=MASK), False),
    ],
    ids=["by position", "a constant by position", "by name", "a constant by name", "another mapping"],
)
def test_several_inputs(inputs: Inputs, double: bool) -> None:
    agree(tangent_kernel(several(), inputs), expected(double), 100 * EPS)


@pytest.mark.parametrize(
    ("form", "output"),
    [("dict", "logits"), ("dataclass", "logits"), ("tuple", 0), ("named tuple", "logits"), ("named tuple", 0)],
)
def test_one_of_several_outputs(form: str, output: str | int) -> None:
    agree(tangent_kernel(several(form), (TOKENS, MASK), output=output), expected(), 100 * EPS)


def test_the_second_of_several_outputs_is_another() -> None:
    """Hidden states have an axis of positions and one of units; the outputs are both."""
    assert tangent_kernel(several("tuple"), (TOKENS, MASK), output=1).shape == (4, 12, 4, 12)


def test_a_step_through_several_inputs_and_outputs_is_exact() -> None:
    made, residual = several("dict"), normal(4, 3, seed=1)
    inputs, queries = {"tokens": TOKENS, "mask": MASK}, {"tokens": TOKENS.flip(1), "mask": MASK}
    gradient = torch.autograd.grad(made(**inputs)["logits"], list(made.parameters()), residual)
    start = own_weights(made)
    end = {name: weight - 0.3 * g for (name, weight), g in zip(start.items(), gradient, strict=True)}
    kernel = secant_kernel(made, start, end, queries, inputs, output="logits")
    before = made(**queries)["logits"].detach()
    after = torch.func.functional_call(made, end, (), queries)["logits"].detach()
    scale = before.abs().max() + after.abs().max() + 0.3 * kernel.abs().max()
    agree(-0.3 * torch.einsum("qcnd,nd->qc", kernel, residual), after - before, 300 * EPS, scale)


@pytest.mark.parametrize(
    ("form", "output", "words"),
    [
        ("dict", None, ("gives a dict", "'logits'", "output=")),
        ("dict", "logit", ("output='logit'", r"did you mean 'logits'\?")),
        ("dict", "cache", ("output='cache'", "not a tensor", "'logits'")),
        ("dataclass", None, ("gives a Answer", "'logits'")),
        ("tuple", None, ("gives a tuple", "0, 1")),
        ("tuple", 2, ("output=2", "0, 1")),
        ("tensor", "logits", ("output='logits'", "leave output out")),
        ("nothing", None, ("NoneType", "no tensor")),
    ],
)
def test_outputs_that_cannot_be_read_are_refused(form: str, output: str | int | None, words: tuple[str, ...]) -> None:
    with refused(*words):
        tangent_kernel(several(form), (TOKENS, MASK), output=output)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((TOKENS, MASK[:3]), (r"\[4, 3\], \[3, 3\]", "one length, the number of examples")),
        ({"tokens": TOKENS, "mask": torch.tensor(1.0)}, (r"\[4, 3\], \[\]",)),
        ((1, 2), ("hold no tensor",)),
        ("text", ("the inputs are a str", "dict of keyword arguments$")),
        (pd.DataFrame({"x": [1.0]}), ("the inputs are a DataFrame", r"torch\.tensor\(frame\.to_numpy\(\)\)")),
    ],
)
def test_inputs_that_are_no_examples_are_refused(inputs: Inputs, words: tuple[str, ...]) -> None:
    with refused(*words):
        tangent_kernel(several(), inputs)
