"""Secant Jacobians. In a step from weights θ₀ to θ₁ = θ₀ + Δθ, the secant Jacobian J̄ is
a matrix with J̄Δθ = f(θ₁) − f(θ₀), exactly. J̄ is computed by propagating differences
through the recorded network.

Each module imports only from the modules listed before it:

uses, segment       operations that use weights; both ends of a step; the test J̄Δθ = Δf
call                one operation with its values before and after a step, and helpers of the rules
rules               a difference rule for each operation
replay              the operations of a tape, run again on differences
ownership           for each element at a use of a weight, the example that it belongs to
"""
