"""What other programs tell is read as it comes, and who is late or fails is said to be so."""

from __future__ import annotations

import os
from pathlib import Path

from tests.bench.race import Kernel, Race


def test_each_kernel_has_a_median_or_a_reason() -> None:
    kernels: list[Kernel] = [("mlp", width, 1, 8, "a method") for width in (1, 2, 3, 4)]
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as stream, open(writing, "wb", buffering=0) as told:
        told.write(b'9.0\n2.0\n4.0\n"ended"\n"too large"\n5.0\n')  # and then nothing, for a call too long
        found = dict(Race(Path(), seconds=0.01).laps("a program", stream, kernels))
    assert found == {kernels[0]: 3.0, kernels[1]: "too large", kernels[2]: "> 0.01 s"}  # the last waits for a new start
