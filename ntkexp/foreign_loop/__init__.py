"""A training loop that somebody else wrote is followed: recorded as it happens, proved to be what it seems, attributed.

    with ntkexp.follow(model, optimizer, queries=x_query) as trace:
        train()                       # any loop of PyTorch, as it is
    found = trace.attribute()         # which examples made each prediction, to rounding

Three proofs stand behind each step: the gradient that was consumed is that of the examples seen, up to one factor; the
optimizer's rule leads from the weights before to those after; the secant explains the change of the queries' outputs.
The first two refuse a step that fails; how far the third is off is told, step by step. Where a call draws random
numbers, as dropout does, the first holds for the masks that were drawn, which are constants of the step; the third for
queries in evaluation, without dropout, for that is how a model is used. Under autocast, the first holds under the same
casts, to the rounding of the shorter numbers, and the third without them; what they cost is told.
"""
