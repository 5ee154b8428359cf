"""Effects: the derivative of the trained outputs by each example's weight,
through all of training."""
