"""What is said of a kernel's cost is what decides how it is computed, and what its features hold."""

from __future__ import annotations

import pytest

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.gram import sizes
from ntkexp.kernel.read.program_cache import parts
from ntkexp.kernel.read.reader import JACOBIANS, costs
from tests.kernel.known import known
from tests.kernel.problems import DENSE, KINDS


@pytest.mark.parametrize("name", KINDS)
def test_a_line_for_every_block_with_the_way_that_is_taken(name: str) -> None:
    network = known(name)
    features, examples = network.features, len(network.given.x)
    found = costs(network.reader, network.tape, examples, examples)
    for line, block in zip(found, features.blocks, strict=True):
        if isinstance(block, Factored):
            assert line.uses == block.inputs.shape[1]
            assert line.way == sizes(block, block).way
        else:
            assert line.way == "gradients"
    held = sum(part.numel() * part.element_size() for part in parts(features))
    assert sum(line.bytes for line in found) >= 2 * held


@pytest.mark.parametrize("name", DENSE)
def test_what_no_rule_knows_is_said(name: str) -> None:
    network = known(name)
    assert {line.way for line in costs(network.reader, network.tape, 8, 4)} == {JACOBIANS}
