"""Secants: propagate a difference of weights through a tape by a linear map J̄ that is exact,
J̄Δθ = f(θ₁) − f(θ₀).

Each module imports only from the modules listed before it:

uses, segment       where operations use weights; both ends of a step, and the check J̄Δθ = Δf
call                one operation at both ends of a step, and the helpers of the rules
rules               a difference rule for each operation
replay              the operations of a tape, run again on differences
ownership           the example that owns each element of a use
"""
