"""Jacobians in factored form, and the kernels computed from them.

Each module imports only from the modules listed before it:

blocks              gradients of a weight and its bias, in one of three formats
jacobian            the Jacobian of a batch, a sum of blocks
assemble            from outputs to a Jacobian: back-propagation to each use of a weight
gram, cancellation  the kernel of two Jacobians; detection of gradients that are only rounding error
adjoint             −∂(outputs at the end of training)/∂(momentum at a step), as a dense array
directional         gradients that are only known by their products with directions
"""
