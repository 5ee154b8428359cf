"""What every run needs sooner or later, loaded before processes are forked: each would spend a second on it."""

import sklearn.datasets  # noqa: F401  where most data come from
