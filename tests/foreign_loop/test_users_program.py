"""Following leaves the rest of the user's program alone: its tensors, and what it prints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.foreign_loop.trace import Trace
from tests.foreign_loop import loops
from tests.foreign_loop.loops import Loop, followed, loop, plain
from tests.foreign_loop.test_follow import Scaled, clamped_at_last, needed

EXACT = 1e-12


def rounded() -> Trace:
    """A loop in which Adam divides rounding by its own size."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net, x = Scaled(), torch.randn(6, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with ntkexp.follow(net, optimizer, queries=x[:2]) as trace:
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.normalize(net(x)).square()[:, 0].sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trace


SPEAKING: dict[str, tuple[Callable[[], Trace], str]] = {
    "rounding": (rounded, "rounding did"),
    "outside": (lambda: followed(loop(loops.sgd), clamped_at_last), "changed after the last step"),
    "memory": (lambda: followed(loop(loops.sgd), plain, memory_gb=0.1), "`half_by` is left out"),
}


@pytest.mark.parametrize("case", SPEAKING)
@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_attribution_says_nothing(
    case: str, quiet: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    make, said = SPEAKING[case]
    trace = make()
    memory_gb = 1.1 * needed(trace) if case == "memory" else None
    caplog.clear()
    capfd.readouterr()
    trace.attribute(memory_gb=memory_gb, quiet=quiet)
    assert (said in caplog.text) is not quiet
    if quiet:
        assert capfd.readouterr() == ("", "")

    # and what comes later is heard again
    caplog.clear()
    logging.getLogger("ntkexp.follow").warning("later")
    assert "later" in caplog.text


def test_the_queries_are_those_that_were_given_when_following_began() -> None:
    """Whatever the loop writes into its tensor then."""

    def reused(given: Loop, batch: Tensor) -> None:
        plain(given, batch)
        given.queries.copy_(given.x[:3])

    given = loop(loops.adamw)
    asked = given.queries.clone()
    start = given.model(asked).detach()
    found = followed(given, reused).attribute()
    expected = (given.model(asked).detach() - start).numpy()
    missed = found["contribution"].sum("example") + found["decay"] - expected
    assert float(abs(missed).max()) <= EXACT * float(abs(expected).max())
    again = followed(replace(loop(loops.adamw), queries=asked), plain).attribute()
    assert (again["contribution"] == found["contribution"]).all()
