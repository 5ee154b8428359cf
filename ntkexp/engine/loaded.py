"""What every run needs sooner or later, loaded before processes are forked: each would spend two seconds on it."""

import sklearn.datasets  # noqa: F401  where most data come from
import torch

torch.use_deterministic_algorithms(True)  # as every run does; a part of torch that takes a second is imported for it
