"""The steps of a followed loop are stored, in memory or in a folder, and replayed from there.

    files.py     what is stored of a step, wherever that is; the files of a folder, and the bytes of tensors
    memory.py    in memory
    disk.py      in a folder, where a killed training leaves all of its steps, and where a trace goes on
    shards.py    what each of several processes stored that trained together, joined
    replay.py    weights are stored every few steps; those between are replayed, and proved, from there

An *event* is a step of one optimizer; several of them may be one step. A *checkpoint* are the weights, and the states
of the optimizers, before an event, and a *segment* the steps between two of them.
"""
