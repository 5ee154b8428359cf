"""What programs say whose scores are asked for, in environments of their own: `tests.bench.peers` asks them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def answer(score: Callable[[Mapping[str, Any]], Tensor]) -> None:
    """Answer as long as somebody asks: a line names the file of the question, and that of the answer."""
    for line in sys.stdin:
        asked, place = line.rstrip("\n").split("\t")
        case = torch.load(asked, weights_only=False)
        torch.set_num_threads(case["threads"])
        start = time.process_time()
        found = score(case)
        torch.save((found, time.process_time() - start), place)
        print("answered", flush=True)
