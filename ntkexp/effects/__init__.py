"""Leave-out effects: the change of the trained outputs if an example is left out of
training, computed by differentiating through all of training."""
