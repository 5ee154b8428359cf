"""What would change: the derivative of what was trained by the weight of each example, through the whole training."""
