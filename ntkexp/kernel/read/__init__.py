"""The Jacobian of a function is read the cheapest way that is right, or the way is refused.

Each line imports only from the lines above it:

plan                which outputs are read at a time, and by how many threads
program_cache       programs that record and read again, kept from step to step
checks              whether examples are independent, and gradients are derivatives
reader              from tapes to Jacobians
sketched            examples read some at a time, exactly or by a sketch
"""
