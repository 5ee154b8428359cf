"""Secants: how a difference of weights passes through a tape, exactly, as one linear map.

Each line imports only from the lines above it:

uses, segment       uses of weights by operations; both ends of a step, and its closure J̄Δθ = Δf
call                one operation at both ends of a step, and the helpers of the rules
rules               a difference rule for each operation
replay              the operations of a tape, replayed on differences
ownership           the example that owns each element of a use
"""
