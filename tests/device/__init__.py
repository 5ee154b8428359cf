"""Kernels, runs and followed loops on an accelerator agree with those on the CPU, and do not mix devices.

On a machine without a GPU, `emulated.cpp` registers a device with torch that computes on the CPU and raises the errors
of a GPU. `conftest.py` runs the tests of this folder in a separate process, because a process can start torch's threads
for devices only once. So the arguments of tests must be picklable.
"""
