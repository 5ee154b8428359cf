"""The sum backwards, which optimizers with memory need."""
