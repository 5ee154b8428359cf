"""A secant closes to a multiple of the rounding of f, and one that does not is found out."""

from __future__ import annotations

import pytest
import torch

from ntkexp.kernel.read import checks
from ntkexp.kernel.secant.call import Call, Result
from ntkexp.kernel.secant.ownership import Owners, owners
from ntkexp.kernel.secant.rules import RULES
from ntkexp.kernel.secant.segment import closure
from ntkexp.library import secant_kernel
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import problem

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
