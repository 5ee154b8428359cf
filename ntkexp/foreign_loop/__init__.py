"""Follow a user's own training loop: record it, prove each step,
and attribute outputs to examples.

    with ntkexp.follow(model, optimizer, queries=x_query) as trace:
        train()                       # any loop of PyTorch, unchanged
    attribution = trace.attribute()   # contribution of each example to each output

A call is one forward pass of the model in the loop. For each call, the trace records
the inputs, and ∂L/∂f, the gradient of the loss with respect to the outputs f. Each
optimizer step has three proofs, which are numerical checks up to rounding:

(a) The gradient that the optimizer used is the sum of the gradients of the recorded
    examples, up to a factor (clipping, or the scale of a GradScaler).
(b) The optimizer's update rule maps the weights before the step to the weights after
    the step.
(c) The secant Jacobian times the change of the weights is the change of the outputs at
    the queries.

If (a) or (b) fails, an error is raised. The error of (c) is reported. *Casts* are
autocast, or frozen weights of lower precision than the trained weights. (a) is checked
under the casts of the loop, and with the random numbers that the call drew, for example
the masks of dropout. (c) is checked without casts and in evaluation mode.

A *query* is an input whose outputs are attributed. The *circumstances* of a call are
the modes of its layers, the states of random number generators, autocast, and the
allowed kernels. A *signature* is a random projection of a gradient or a weight. A
*fingerprint* is a random projection of the outputs of a call. Signatures and
fingerprints are stored and compared instead of the tensors.

Each module imports only from the modules listed before it:

    closing              the final check: the parts add up to the change of the outputs
    example_names        names of examples: digests, the user's names, indices in a Dataset
    hooks, host_reads    hooks that copies of a model do not keep; transfers from a device
    batch_norm           running statistics of BatchNorm
    batch_gradients      per-example gradients through a batch that couples its examples
    clipping             proof (a): factors between gradients, explained by scales and clipping
    value_clipping       proof (a) if gradients were clipped by value: a factor for each element
    rule, torch_rules    proof (b): the linear step of an optimizer; PyTorch's optimizers
    library_rules        Lion, signSGD, LAMB, LARS and schedule-free optimizers of other libraries
    known_optimizers     the rule of each optimizer
    example_losses       losses of examples by the user's function in `trace.losses`
    call                 one recorded model call: inputs, modes and random states, ∂L/∂f
    equal_inputs         signs that several examples share a name
    positions            contributions split by the positions of a text
    user_loss            the user's loss, and weights of examples when the loop runs again
    measure              the user's measure of outputs at the queries
    fingerprints         random projections of outputs, which show if a replay repeats the loop
    model_function       the model as a function of its weights, for queries and for each call
    example_gradients    per-example gradients Jᵀℓ′ of a call
    arguments, outside   checks of arguments; changes that no step made
    step, store/         one step; steps in memory and on disk, and their replay
    followed_training    the loop as a differentiable training
    problem, step_log    the interface of a trace for effects and reruns; numbers for a log
    first_step           proof (a) of the first step, right after it
    again                the loop run again with weighted examples
    running_loop         the tensors of a running loop, and who may change them
    pending_calls        the calls whose gradients a later step may use, and their ∂L/∂f
    call_recorder        the hooks at the calls of the model
    step_recorder        the hooks at the steps of the optimizers
    watch                both recorders, and their hooks from the first step to the last
    gallery, run_folder  examples to be shown; the attribution as a run that `ntkexp report` shows
    loop_sums            sums over steps by example, component and position, and their memory
    attribution, effects the sum over steps, from the last to the first; leave-out effects
    trace, follow        the object that `follow` yields, and its folder; the entry point
    loop_breakdown       the change caused by a removal, divided among the examples
"""
