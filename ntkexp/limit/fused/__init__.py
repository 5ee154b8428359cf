"""The fused engine for CPUs, compiled with numba. It applies all layers to one tile
before it begins the next tile.

A *tile* holds the NNGP kernel K and the tangent kernel Θ of two examples, for one
offset o: at all pixels p of the first example and p + o of the second. A network
becomes a list of operations on *registers*; each register holds a tile. A *level*
contains the operations on images of one size. A *field* is a function of the variance q
at each pixel of an example, such as √q. Fields are computed once per example, before
the loops over pairs.

Each module imports only from the modules listed before it:

    program     layers as operations on tiles, and tables for compiled loops
    functions   compilation, loops over flat arrays, and fast functions
    tile        the operations on a tile
    images      pixels in a tile, coarser levels, and the loop over offsets
    run         vectors, sub-blocks on threads, and the remaining layers
"""
