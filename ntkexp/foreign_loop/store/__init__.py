"""A trace on disk: what each step took in, some of its weights, and the steps between replayed from there."""
