"""Record what a function of weights does on one batch, operation by operation,
and run it again.

Each module imports only from the modules listed before it:

tape, products          the recorded operations; the precision of matrix products
convolution             convolutions as products of patches
recorder                torch modes that record operations
taping                  run a function and record it, always with the same torch operations
casts, independence     ignore or keep casts to low precision; reject functions that couple examples
program                 compile recorded operations to Python code that runs again
"""
