"""Many networks from random starts, beside the Gaussian processes that they are at infinite width."""
