"""Follow a user's own training loop: record it, prove each step, and attribute outputs to examples.

    with ntkexp.follow(model, optimizer, queries=x_query) as trace:
        train()                       # any loop of PyTorch, unchanged
    found = trace.attribute()         # which examples made each prediction, to rounding

Each step has three proofs. (a) The consumed gradient is that of the recorded examples, up to one
factor. (b) The optimizer's rule leads from the weights before the step to those after it. (c) The
secant explains the change of the outputs at the queries. A step that fails (a) or (b) is refused;
the error of (c) is reported. If a call draws random numbers, as dropout does, (a) holds for the
drawn masks, and (c) for queries in evaluation mode. Under autocast, (a) holds under the same casts,
and (c) without them.

The files, in an order in which each imports only earlier ones:

    closing              the final check: the parts add up to the change
    example_names        names of examples: digests, names of the user, places in a Dataset
    hooks, host_reads    hooks that copies of a model do not keep; transfers from a device
    batch_norm           running statistics of BatchNorm
    batch_gradients      gradients of examples through a batch that norms couple
    clipping             proof (a): factors between gradients, which scales and clipping explain
    rule, torch_rules    proof (b): the linear step of an optimizer; PyTorch's optimizers
    call                 one recorded call: circumstances, inputs, ∂L/∂f
    equal_inputs         signs that one name stands for several examples
    positions            contributions split by the positions of a text
    user_loss            the user's loss, and weights of examples in a loop run again
    measure              the user's measure of outputs at the queries
    signatures           signatures of outputs, which show whether a replay is that of the loop
    model_function       the model as a function of its weights, as each call had it
    example_gradients    Jᵀℓ′ of the examples of a call
    arguments, outside   checks of arguments; changes that no step made
    step, store/         one step; steps in memory and on disk, and their replay
    followed_training    the loop as a training that can be differentiated
    problem, step_log    the interface of a trace for effects and reruns; numbers for a log
    first_step           proof (a) of the first step, right after it
    again, watch         the loop run again with weights of its examples; the hooks that record
    gallery, run_folder  examples to be shown; the attribution as a run that `ntkexp report` shows
    loop_sums            sums over steps by example, component and position, and their memory
    attribution, effects the sum over steps, from the last to the first; leave-out effects
    trace, follow        the user's object and its folder; the entry point
    loop_breakdown       the change without some examples, divided among all others
"""
