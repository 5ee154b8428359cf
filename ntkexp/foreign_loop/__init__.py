"""Following a user's own training loop: recording, proof and attribution.

    with ntkexp.follow(model, optimizer, queries=x_query) as trace:
        train()                       # any loop of PyTorch, as it is
    found = trace.attribute()         # which examples made each prediction, to rounding

Three proofs stand behind each step: the gradient that was consumed is that of the examples seen, up to one factor; the
optimizer's rule leads from the weights before to those after; the secant explains the change of the queries' outputs.
The first two refuse a step that fails; the error of the third is reported, step by step. Where a call draws random
numbers, as dropout does, the first holds for the masks that were drawn, which are constants of the step; the third for
queries in evaluation, without dropout, for that is how a model is used. Under autocast, the first holds under the same
casts, to the rounding of the shorter numbers, and the third without them; their cost is reported.

Where to read what:

    follow.py              the line around the loop; arguments.py: what it is given, and refuses beforehand
    watch.py               the algorithm of following: what is recorded of each call and step, and proved as it happens
    hooks.py               hooks on what is followed, which do nothing on its copies
    calls.py               a call of the model: its circumstances, its inputs, ∂L/∂f, its losses
    example_names.py       by what names examples go; equal_inputs.py: signs that one name is several examples
    outside.py             what changes the model and is no step: refused, or a part of its own
    rule.py, step.py       the linear step of an optimizer, and proof (b); a step, and the interfaces of stores
    step_log.py            the numbers of each step, for a function of the user's
    store/                 steps in memory and on disk, and their replay
    replayed_module.py     the module as functions of its weights, as each call had it; whether it gives what it gave
    host_reads.py          numbers of a device, many with one transfer
    clipping.py            proof (a): the factors between gradients, which scales and clipping explain
    attribution.py         what each step added, on the way back; trace.py: what its user asks, and a trace in a folder
    run_folder.py          what was found, as a run that `ntkexp report` shows
    followed_training.py   a loop as a training that can be differentiated; effects.py, again.py, loop_ledger.py: what
                           leaving examples out would change, and trainings without them
"""
