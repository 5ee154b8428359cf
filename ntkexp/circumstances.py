"""Where and how a run computes, fixed before it begins: threads, device, determinism. They move results by rounding."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch

from ntkexp.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.version import package_version, results_version


def settle(experiment: Experiment, threads: int | None = None) -> int:
    """Fix the number of threads (that of a checkpoint, if given) and demand the same bits each time."""
    count = threads or experiment.threads or len(os.sched_getaffinity(0))
    check_device(experiment.device)
    torch.set_num_threads(count)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS may not be deterministic
    torch.use_deterministic_algorithms(True)
    return count


def check_device(name: str) -> None:
    """A device that this machine has."""
    known = ["cpu"] + [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    if name not in known and not (name == "cuda" and len(known) > 1):
        raise Mistake(f"device={name}: this machine has {', '.join(known)}" + ("" if len(known) > 1 else " alone"))


def provenance(experiment: Experiment, threads: int) -> dict[str, Any]:
    """What wrote a run, and where."""
    device = torch.device(experiment.device)
    return {
        "ntkexp": package_version(),
        "results_version": results_version,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": threads,
        "deterministic": True,
    }
