"""Read the Jacobian of a function from its recorded operations, in the cheapest valid
way.

Each module imports only from the modules listed before it:

plan                the number of outputs read at a time, and the number of threads
program_cache       compiled programs that record functions and read Jacobians, used at many steps
checks              whether examples are independent, and gradients are derivatives
reader              from tapes to Jacobians
sketched            many examples, read in batches: exact kernels and sketched kernels
"""
