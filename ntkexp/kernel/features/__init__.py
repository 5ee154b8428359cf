"""Jacobians in factored form, and the kernels that they have.

Each line imports only from the lines above it:

blocks              gradients of a weight and its bias: factors, rows, or copies from a table
jacobian            the Jacobian at some examples, a sum of blocks
assemble            from outputs to a Jacobian: back-propagation to each use of a weight
gram, cancellation  the kernel of two Jacobians; gradients that are nothing but rounding
adjoint             the dense adjoint of the sum backwards
"""
