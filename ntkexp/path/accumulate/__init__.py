"""What is accumulated along a path, step by step, and how well its parts are known."""
