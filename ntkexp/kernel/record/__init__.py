"""What a function of weights does on one batch is recorded, operation by operation, and runs again as a program."""
