"""Laws of an accelerator: kernels, runs and followed loops are as on the processor, and nothing mixes devices.

On a machine without a GPU, `emulated.cpp` registers a device with torch that computes on the processor and raises
whenever a GPU would. `conftest.py` runs the tests of this folder in a process of their own, as torch starts its threads
for devices once in a process. A new law is a test here; its arguments must be picklable.
"""
