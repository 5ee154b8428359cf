"""Recording a module as it runs, and comparing what it did at two places."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.record.program import program
from ntkexp.kernel.record.recorder import Recorder, functional_twin
from ntkexp.kernel.secant.call import NoRule
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs
from tests.kernel import oracle
from tests.kernel.oracle import agree
from tests.kernel.problems import KINDS, Formula, known


def module(function: Callable[..., Tensor], seed: int = 0, **shapes: tuple[int, ...]) -> nn.Module:
    """A formula with random weights."""
    made = Formula(function, **shapes).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return made


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("name", KINDS)
def test_a_tape_holds_what_the_module_gives(name: str) -> None:
    network = known(name)
    expected = network.given.module(network.given.x).detach().reshape(len(network.given.x), -1)
    agree(network.tape.outputs, expected, 100 * torch.finfo(torch.float64).eps)  # attention runs by other kernels


@pytest.mark.parametrize("name", KINDS)
def test_the_structure_is_the_same_at_two_weights(name: str) -> None:
    step = known(name).step(0.3)
    assert step.start.structure == step.end.structure
    assert step.start.program == step.end.program


def test_a_tape_overwrites_nothing() -> None:
    assert not any(entry.op._schema.is_mutable for entry in known("written in place").tape.entries)


def test_loops_are_unrolled() -> None:
    count = {name: len(known(name).tape.entries) for name in ("called twice", "called three times")}
    once_more = count["called three times"] - count["called twice"]
    assert once_more > 0
    assert count["called twice"] > 2 * once_more


def branching(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) if w.sum() > 0 else torch.tanh(x @ w) + 1


def test_a_branch_that_both_ends_take_is_read() -> None:
    made, x = module(branching, w=(3, 2)), inputs(4, 3)
    end = {"w": made.get_parameter("w").detach() + 0.01}
    change = torch.func.functional_call(made, end, (x,)) - made(x)
    reader, own = reader_of(made)
    reading = reader.secant(reader.record(own, x), reader.record(end, x))
    # rounding of two outputs of size about one
    agree(reading.push, change.detach(), 100 * torch.finfo(torch.float64).eps, made(x).abs().max().detach())


def test_a_number_read_into_python_is_a_constant_of_a_tangent() -> None:
    """As it is for autograd."""
    made, x = module(lambda x, w: x @ w * float(w.detach().sum()), w=(3, 2)), inputs(4, 3)
    agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 100 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize(
    "function",
    [
        branching,
        lambda x, w: x @ w * float(w.sum()),
        lambda x, w: x @ w if w.sum() > 0 else x @ w[:, [0]].expand(-1, 2),
    ],
    ids=["a branch", "a number read into Python", "other shapes inside"],
)
def test_ends_that_differ_are_refused_in_one_line(function: Callable[..., Tensor]) -> None:
    made, x = module(function, w=(3, 2)), inputs(4, 3)
    start = {"w": made.get_parameter("w").detach().abs()}
    with pytest.raises(NoRule) as caught:
        secant_kernel(made, start, {"w": -start["w"]}, x, x)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: nn.functional.dropout(x @ w, 0.5, training=True),
        lambda x, w: x @ w + torch.randn(len(x), 2, dtype=x.dtype),
        lambda x, w: x @ w * torch.rand_like(x[:, :2]),
        lambda x, w: x @ w + torch.bernoulli(torch.full((len(x), 2), 0.5, dtype=x.dtype)),
    ],
    ids=["dropout", "randn", "rand_like", "bernoulli"],
)
def test_random_numbers_are_refused_by_name(function: Callable[..., Tensor]) -> None:
    with pytest.raises(Mistake, match=r"draws random numbers \(aten\."):
        tangent_kernel(module(function, w=(3, 2)), inputs(4, 3))


@pytest.mark.parametrize("layer", [nn.Dropout(0.2), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_layers_in_training_mode_are_refused_by_name(layer: nn.Module) -> None:
    made = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)).double()
    with pytest.raises(Mistake, match=rf"layer '1' \({type(layer).__name__}.*module\.eval\(\)"):
        tangent_kernel(made, inputs(5, 3))


def test_one_layer_left_in_training_mode_is_sent_to_evaluation() -> None:
    made = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double().eval()
    made[1].train()
    with pytest.raises(Mistake, match=r"layer '1' \(Dropout, p=0\.2\) is random.*; call module\.eval\(\) first"):
        tangent_kernel(made, inputs(5, 3))


def test_dropout_and_batch_norm_in_evaluation_are_read() -> None:
    made = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    assert tangent_kernel(made, inputs(5, 3)).shape == (5, 1, 5, 1)


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
    tangent_kernel(made, inputs(4, 3))
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(weight.grad is None for weight in made.parameters())


def test_a_module_that_overwrites_its_inputs_is_refused() -> None:
    with pytest.raises(Mistake, match="overwrites its inputs"):
        tangent_kernel(module(lambda x, w: x.add_(1) @ w, w=(3, 2)), inputs(4, 3))


@pytest.mark.parametrize("function", [lambda x, w: (x @ w).sum(), lambda x, w: (x @ w).t()], ids=["sum", "transposed"])
def test_outputs_that_are_not_one_an_example_are_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(Mistake, match="first axis must be that of the examples"):
        tangent_kernel(module(function, w=(3, 2)), inputs(4, 3))


def test_complex_numbers_are_refused() -> None:
    made = module(lambda x, w: torch.complex(x @ w, x @ w), w=(3, 2))
    with pytest.raises(Mistake, match=r"complex outputs.*torch\.view_as_real"):
        tangent_kernel(made, inputs(4, 3))
    real = module(lambda x, w: (x.to(w.dtype) @ w).abs(), w=(3, 2))
    real.w = nn.Parameter(torch.ones(3, 2, dtype=torch.complex128))
    with pytest.raises(Mistake, match=r"'w' is complex.*torch\.view_as_complex"):
        tangent_kernel(real, inputs(4, 3))


def test_rrelu_in_evaluation_draws_nothing() -> None:
    made = nn.Sequential(nn.Linear(3, 4), nn.RReLU(0.1, 0.5), nn.Linear(4, 1)).double().eval()
    agree(tangent_kernel(made, inputs(5, 3)), oracle.tangent(made, inputs(5, 3), inputs(5, 3)), 1e-14)


def test_a_layer_without_units_carries_nothing() -> None:
    made = module(lambda x, w, v, u: x @ w @ v + x @ u, w=(3, 0), v=(0, 2), u=(3, 2))
    start, end = ({name: size * weight.detach() for name, weight in made.named_parameters()} for size in (1.0, 1.5))
    expected = oracle.tangent(made, inputs(5, 3), inputs(5, 3))
    agree(secant_kernel(made, start, end, inputs(5, 3), inputs(5, 3)), expected, 1e-14)


IN_PLACE = [
    op
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::") and schema.name.endswith("_") and not schema.name.endswith("__")
    for op in [getattr(getattr(torch.ops.aten, schema.name[6:]), schema.overload_name or "default")]
]


def test_what_writes_in_place_has_a_twin_that_takes_the_same() -> None:
    """Of all operations of torch; a tensor is not a number, whatever the argument is called."""
    found = {op: twin for op in IN_PLACE if (twin := functional_twin(op)) is not None}
    assert len(found) > 200
    for op, twin in found.items():
        pairs = zip(op._schema.arguments, twin._schema.arguments, strict=True)
        assert all(one.name == other.name and one.type == other.type for one, other in pairs), (op, twin)


def test_a_program_keeps_the_last_operation_of_several_that_give_the_same() -> None:
    """The gates of an LSTM are parts of what was written in place, and parts of its storage as well."""
    tape = known("lstm").reader.record(known("lstm").given.start, known("lstm").given.x)
    pruned = tape.pruned()
    before, after = ({entry.name for entry in each.entries} for each in (tape, pruned))
    assert before - after >= {"index_copy", "index_select"}
    made = [slot for entry in pruned.entries for slot in entry.makes]
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
    """By the program of its tape, where functionalize has no part in it."""
    h, k = inputs(4, 3), inputs(4, 3).cos()
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


EPS = torch.finfo(torch.float64).eps


class Pair(NamedTuple):
    """A tuple with names."""

    logits: Tensor
    hidden: Tensor


@dataclass
class Answer:
    """What a network may give beside its outputs."""

    logits: Tensor
    cache: list[Tensor]
    loss: Tensor | None = None


class Several(nn.Module):
    """Tokens and a mask, with a switch; the answer comes as it is asked for."""

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
    """With the same random weights in every form."""
    made = Several(form).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return made


TOKENS = torch.tensor([[0, 3, 6], [1, 1, 2], [5, 4, 0], [2, 6, 6]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]]).double()


class Joined(nn.Module):
    """The same network with one input, for the oracle."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.inner, self.twice = several(), double

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x[:, :3].long(), x[:, 3:].double(), self.twice)
        return outputs


def expected(double: bool = False) -> Tensor:
    """By plain Jacobians."""
    x = torch.cat([TOKENS.double(), MASK], 1)
    return oracle.tangent(Joined(double), x, x)


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
    made = several("dict")
    start = {name: weight.detach() for name, weight in made.named_parameters()}
    residual = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = {"tokens": TOKENS, "mask": MASK}
    gradient = torch.autograd.grad(made(**inputs)["logits"], list(made.parameters()), residual)
    end = {name: weight - 0.3 * g for (name, weight), g in zip(start.items(), gradient, strict=True)}
    queries = {"tokens": TOKENS.flip(1), "mask": MASK}
    kernel = secant_kernel(made, start, end, queries, inputs, output="logits")
    before = made(**queries)["logits"].detach()
    after = torch.func.functional_call(made, end, (), queries)["logits"].detach()
    scale = before.abs().max() + after.abs().max() + 0.3 * kernel.abs().max()
    agree(-0.3 * torch.einsum("qcnd,nd->qc", kernel, residual), after - before, 300 * EPS, scale)


@pytest.mark.parametrize(
    ("form", "output", "words"),
    [
        ("dict", None, ("gives a dict", "'logits'", "output=")),
        ("dict", "logit", ("output='logit'", "did you mean 'logits'?")),
        ("dict", "cache", ("output='cache'", "not a tensor", "'logits'")),
        ("dataclass", None, ("gives a Answer", "'logits'")),
        ("tuple", None, ("gives a tuple", "0, 1")),
        ("tuple", 2, ("output=2", "0, 1")),
        ("tensor", "logits", ("output='logits'", "leave output out")),
        ("nothing", None, ("NoneType", "no tensor")),
    ],
)
def test_outputs_that_cannot_be_read_are_refused_in_one_line(
    form: str, output: str | int | None, words: tuple[str, ...]
) -> None:
    with pytest.raises(Mistake) as caught:
        tangent_kernel(several(form), (TOKENS, MASK), output=output)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((TOKENS, MASK[:3]), ("[4, 3], [3, 3]", "same examples")),
        ({"tokens": TOKENS, "mask": torch.tensor(1.0)}, ("[4, 3], []",)),
        ((1, 2), ("hold no tensor",)),
        ("text", ("the inputs are a str", "dict of keyword arguments")),
    ],
)
def test_inputs_that_are_no_examples_are_refused_in_one_line(inputs: Inputs, words: tuple[str, ...]) -> None:
    with pytest.raises(Mistake) as caught:
        tangent_kernel(several(), inputs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
