"""Features: Jacobians in factored form, and the kernels that they have."""
