"""The fused engine for CPUs, compiled with numba. It applies all layers to a small part
of the kernels, a *band*, before it begins the next band. The values of a band therefore
stay in the cache.

For images, a band holds the NNGP kernel K and the tangent kernel Θ of two examples for
one offset o. It pairs each pixel p of the first example with pixel p + o of the second.
For vectors, a band is a piece of a row of both kernel matrices. A network becomes a
list of operations on *registers*; each register holds a band. A *level* contains the
operations on images of one size. A *field* is a function of the variance q at each
pixel of an example, such as √q. Fields are computed once per example, before the loops
over pairs.

Each module imports only from the modules listed before it:

    program     layers as operations on bands, and tables for compiled loops
    functions   compilation, loops over flat arrays, and fast functions
    band        the operations on a band
    images      pixels in a band, coarser levels, and the loop over offsets
    run         vectors, sub-blocks on threads, and the remaining layers
"""
