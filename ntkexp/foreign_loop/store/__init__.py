"""Stores for the steps of a followed loop, in memory or in a folder,
and the replay of the steps.

    checkpoints.py   the interval between stored weights; states of optimizers
    files.py         the files of a trace, tensors as bytes, and events, the stored form of a step
    replay.py        replays and proves the steps between checkpoints
    memory.py        a store in memory
    chosen.py        a store for some steps, in memory
    endpoints.py     a store for the weights at both ends of a loop that runs again
    shards.py        processes that train together, and the parts of the trace that each stores
    disk.py          a store in a folder, which survives kills and continues resumed loops

An *event* is a step of one optimizer. If several optimizers use the same backward pass,
their events belong to one step. A *checkpoint* holds the weights and the optimizer
states before an event. A *segment* is the steps between two checkpoints."""
