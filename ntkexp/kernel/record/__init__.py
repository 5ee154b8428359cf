"""Record what a function of weights does on one batch, operation by operation, and run it again.

Each line imports only from the lines above it:

tape, products          the recorded operations; the precision of products of matrices
convolution             convolutions as products of patches
recorder                the modes of torch that write operations down
taping                  a function is run and recorded, with the same kernels of torch each time
casts, independence     casts ignored or kept; refuses functions that couple examples
program                 recorded operations as Python code that runs again
"""
