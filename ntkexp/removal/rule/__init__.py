"""How a difference between two trainings goes back through a step, one file for each kind of optimizer."""
