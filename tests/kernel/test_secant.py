"""The secant kernel: exact for one step of gradient descent, however long, and the tangent at length zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ntkexp.kernel.read import checks
from ntkexp.kernel.secant.call import Call, Result
from ntkexp.kernel.secant.ownership import Owners, owners
from ntkexp.kernel.secant.rules import RULES, norm
from ntkexp.kernel.secant.rules.linear import warn_of_padding
from ntkexp.kernel.secant.segment import closure
from ntkexp.library import reader_of, secant_kernel
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights
from tests.kernel.oracle import agree, applied
from tests.kernel.problems import KINDS, READ, Known, known, problem

EPS = torch.finfo(torch.float64).eps
ROUNDING = 300 * EPS  # relative to the sizes of f and of the terms that sum to its change
SIZES = (1e-8, 1e-4, 0.3, 3.0)


BROKEN = ("relu", "leaky_relu", "max pooling", "branching", "learned slopes", "two heads", "tied embedding")
"""Networks with kinks and choices, which a longer step crosses."""


def outputs(network: Known, weights: Weights, x: Tensor) -> Tensor:
    """f(θ; x), a row an example."""
    found: Tensor = functional_call(network.given.module, network.given.start | weights, (x,), tie_weights=True)
    return found.detach().reshape(len(x), -1)


@pytest.mark.sample(30)
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in READ for size in (SIZES if name in BROKEN else (1e-8, 3.0))]
)
def test_the_push_and_the_reverse_close(name: str, size: float) -> None:
    step = known(name).step(size)
    agree(step.reading.push, step.change, ROUNDING, step.scale)
    agree(applied(step.reading.jacobian, step.weights), step.change, ROUNDING, step.scale)
    found = closure(step.reading.push, step.start, step.end)
    assert found.holds
    assert found.error < found.bound / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in KINDS for size in ((1e-3, 0.3, 3.0) if name in BROKEN else (0.3,))]
)
def test_one_step_of_descent_is_exact(name: str, size: float) -> None:
    """f(end; x) − f(start; x) = −η Σᵢ K̄(x, xᵢ) ℓ′ᵢ for the gradient step of any loss with output gradients ℓ′."""
    network = known(name)
    given, start = network.given, network.given.start
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(network.tape.outputs.shape, generator=generator, dtype=torch.float64) / len(given.x)
    end = {
        key: start[key] - size * torch.einsum("ncp,nc->p", rows[:5], residual).view(start[key].shape)
        for key, rows in network.jacobians.items()
    }
    kernel = secant_kernel(given.module, start, end, network.other, given.x)
    predicted = -size * torch.einsum("qcnd,nd->qc", kernel, residual)
    before, after = outputs(network, {}, network.other), outputs(network, end, network.other)
    terms = size * torch.einsum("qcnd,nd->qc", kernel.abs(), residual.abs()).max()
    agree(predicted, after - before, ROUNDING, before.abs().max() + after.abs().max() + terms)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", KINDS)
def test_at_length_zero_it_is_the_tangent_kernel_and_symmetric(name: str) -> None:
    network = known(name)
    kernel = secant_kernel(network.given.module, {}, {}, network.given.x, network.given.x)
    agree(kernel, network.kernel[:, :, :5], 100 * EPS)
    agree(kernel, kernel.permute(2, 3, 0, 1), 100 * EPS)


def test_it_is_not_symmetric_along_a_step() -> None:
    given = problem("tanh")
    kernel = secant_kernel(given.module, {}, given.end(1.0), given.x, given.x)
    assert (kernel - kernel.permute(2, 3, 0, 1)).abs().max() > 1e-2 * kernel.abs().max()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["relu", "tanh", "called twice", "gains and shifts", "low rank", "two heads"])
def test_frozen_parameters_may_move_and_add_nothing_to_the_kernel(name: str) -> None:
    """What each parameter adds is its own, at the values of all of them: the shares add up to the whole kernel."""
    given = problem(name, seed=3)
    end = given.end(0.5)
    whole = secant_kernel(given.module, given.start, end, given.x, given.x)
    parameters = list(given.module.parameters())
    shares = []
    for chosen in parameters:
        for weight in parameters:
            weight.requires_grad_(weight is chosen)
        shares.append(secant_kernel(given.module, given.start, end, given.x, given.x))
    agree(torch.stack(shares).sum(0), whole, ROUNDING)


def test_the_push_includes_what_frozen_parameters_do() -> None:
    given = problem("gelu", seed=4)
    frozen = next(iter(given.module.parameters()))
    frozen.requires_grad_(False)
    step = Known(given).step(0.5)
    agree(step.reading.push, step.change, ROUNDING, step.scale)


def test_weights_that_are_not_named_are_the_modules_own() -> None:
    given = problem("silu", seed=5)
    end = given.end(0.5)
    some = {"0.weight": end["0.weight"]}
    expected = secant_kernel(given.module, given.start, given.start | some, given.x, given.x)
    assert torch.equal(secant_kernel(given.module, {}, some, given.x, given.x), expected)


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_pieces_telescope(name: str) -> None:
    """The mean of the secants of n equal pieces closes for every n, across kinks too."""
    given = problem(name, seed=6)
    reader, own = reader_of(given.module)
    end = given.end(1.0)
    pieces = 3
    tapes = [
        reader.record({key: torch.lerp(own[key], end[key], k / pieces) for key in own}, given.x)
        for k in range(pieces + 1)
    ]
    step = {key: end[key] - own[key] for key in own}
    parts = [applied(reader.secant(tapes[k], tapes[k + 1]).jacobian, step) for k in range(pieces)]
    change = tapes[-1].outputs - tapes[0].outputs
    agree(torch.stack(parts).mean(0), change, ROUNDING, tapes[0].outputs.abs().max() + tapes[-1].outputs.abs().max())


def test_a_row_of_padding_that_a_tied_readout_moves_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The secant closes, or `secant_kernel` would warn of it; autograd's gradients leave the row out."""
    table = nn.Embedding(7, 4, padding_idx=0).double()
    read = nn.Linear(4, 7, bias=False).double()
    read.weight = table.weight
    net = nn.Sequential(table, nn.Flatten(), nn.Linear(8, 4).double(), read)
    start = {name: weight.detach() for name, weight in net.named_parameters()}
    end = {name: 1.1 * weight + 0.1 for name, weight in start.items()}
    padded, others = torch.tensor([[1, 0], [0, 4]]), torch.tensor([[1, 2], [3, 4]])
    warn_of_padding.cache_clear()
    assert secant_kernel(net, start, end, others, others).isfinite().all()
    assert "row of padding" not in caplog.text
    assert secant_kernel(net, start, end, padded, others).isfinite().all()
    assert "row of padding" in caplog.text


# A secant closes to a multiple of the rounding of f, and one that does not is found out.


SINGLE = ("relu", "tanh", "gelu", "called twice", "convolution", "layer norm", "softmax", "attention", "swiglu")


@pytest.mark.parametrize("size", [1e-6, 0.3])
@pytest.mark.parametrize("name", SINGLE)
def test_every_network_closes_well_within_the_bound_in_single_precision(name: str, size: float) -> None:
    """As test_secant.py says of double precision."""
    step = known(name, torch.float32).step(size)
    agree(step.reading.push, step.change, 300 * torch.finfo(torch.float32).eps, step.scale)
    found = closure(step.reading.push, step.start, step.end)
    assert found.holds
    assert found.error < found.bound / 10


@pytest.mark.parametrize("name", ["relu", "gelu", "softmax", "lstm"])
def test_a_push_that_leaves_something_out_does_not_close(name: str) -> None:
    """A thousandth of a millionth of a step of ordinary size is more than rounding."""
    step = known(name).step(0.3)
    assert not closure((1 - 1e-9) * step.reading.push, step.start, step.end).holds


@pytest.mark.parametrize("name", ["softmax", "attention"])
def test_shares_of_many_numbers_are_found_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = known(name).step(0.3)
    monkeypatch.setattr(norm, "CACHED_ROW_NUMBERS", 5)
    reader, tapes = known(name).reader, (whole.start, whole.end)
    for each, expected in zip(reader.secant(*tapes).jacobian.blocks, whole.reading.jacobian.blocks, strict=True):
        agree(each.numbers, expected.numbers, 10 * EPS)


def test_what_is_no_number_does_not_close() -> None:
    tape = known("tanh").tape
    assert not closure(torch.full_like(tape.outputs, float("nan")), tape, tape).holds


@pytest.mark.parametrize(("size", "raises"), [(1e-3, True), (1e-10, False)])
def test_a_rule_that_is_wrong_is_refused_or_warned_of(
    size: float, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what the library returns: by how much it is off decides which."""
    right = RULES["tanh"]

    def wrong(call: Call) -> Result:
        found = right(call)
        assert isinstance(found, torch.Tensor)
        return (1 + size) * found

    monkeypatch.setitem(RULES, "tanh", wrong)
    monkeypatch.setattr(checks, "is_faithful", lambda *_: True)
    given = problem("tanh")
    words = "the secant misses the change of the outputs by .* where rounding explains"
    with pytest.raises(Mistake, match=words) if raises else pytest.warns(UserWarning, match=words):
        secant_kernel(given.module, {}, given.end(0.3), given.x, given.x)


def test_features_of_other_examples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pushed forwards knows nothing of owners; what is read backwards does."""
    monkeypatch.setattr(
        checks, "owners", lambda *given: Owners(tuple(owner.flip(0) for owner in owners(*given).of_uses))
    )
    given = problem("tanh")
    with pytest.raises(Mistake, match="its kernel would be wrong"):
        secant_kernel(given.module, {}, given.end(0.3), given.x, given.x)


def test_a_secant_to_where_outputs_are_no_numbers_is_refused() -> None:
    given = problem("tanh")
    end = {name: weight * torch.inf for name, weight in given.start.items()}
    with pytest.raises(Mistake, match="are the outputs finite at both ends"):
        secant_kernel(given.module, {}, end, given.x, given.x)
