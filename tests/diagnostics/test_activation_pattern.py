"""Which units are on."""

from __future__ import annotations

import torch
from torch import nn

from ntkexp.diagnostics import pattern
from ntkexp.library import reader_of
from tests.kernel.problems import problem


def test_the_pattern_is_the_sign_at_every_kink() -> None:
    given = problem("relu")
    assert isinstance(given.module, nn.Sequential)
    reader, own = reader_of(given.module)
    first, second = given.module[0](given.x), given.module[:3](given.x)
    expected = torch.cat([first.flatten(), second.flatten()]) > 0
    assert torch.equal(pattern(reader.record(own, given.x)), expected)


def test_it_changes_with_the_unit_that_crosses() -> None:
    given = problem("leaky_relu")
    reader, own = reader_of(given.module)
    before = pattern(reader.record(own, given.x))
    bias = own["2.bias"].clone()
    bias[0] += 1e3
    after = pattern(reader.record(own | {"2.bias": bias}, given.x))
    changed = (before != after).nonzero().flatten()
    hidden = len(given.x) * 7
    assert len(changed) > 0
    assert all(int(unit) >= hidden and (int(unit) - hidden) % 6 == 0 for unit in changed)


def test_smooth_networks_have_none() -> None:
    given = problem("tanh")
    reader, own = reader_of(given.module)
    assert len(pattern(reader.record(own, given.x))) == 0
