"""On a GPU a run may use most of the GPU's memory, unless it is told how much; elsewhere it is as it was."""

from __future__ import annotations

import pytest
import torch

from ntkexp.config.compose import compose
from ntkexp.experiment.identity import identity

CARDS = {None: 80e9, 1: 16e9}  # the current one, and another


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two of them, which is told of by what torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, CARDS[device]))


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("words", "room"),
    [(("device=cuda",), 64.0), (("device=cuda:1",), 12.8), (("device=cuda", "memory_gb=3"), 3.0), ((), 4.0)],
)
def test_a_run_may_use_most_of_its_card(words: tuple[str, ...], room: float) -> None:
    asked = compose(words)
    assert asked.room_gb == pytest.approx(room, rel=1e-12)
    assert identity(asked) == identity(compose([]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_where_there_is_no_card_it_is_as_on_the_processor() -> None:
    assert compose(["device=cuda"]).room_gb == 4.0
