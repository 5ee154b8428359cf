"""torchvision beside a torch that its compiled part was not made for, such as the usual one beside torch for CPUs.

timm, and transformers where torchvision is installed, import it for its Python parts alone. These work once the
operators are declared that torchvision gives shapes to when it is imported.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DECLARED = {"torchvision::nms": BOXES, "torchvision::qnms": BOXES}


def load_torchvision() -> None:
    """Import torchvision, if it is installed, so that what is imported later finds it."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:  # its operators are missing
        for name, schema in DECLARED.items():
            torch.library.define(name, schema)
        import_module("torchvision")
