"""Training with a fixed kernel in closed form, and the Gaussian processes it leads to, from matrices alone."""
