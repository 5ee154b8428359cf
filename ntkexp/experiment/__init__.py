"""What is asked for: an experiment as a value, its identity, and its network at infinite width."""
