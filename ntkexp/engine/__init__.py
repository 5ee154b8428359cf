"""Engines: run jobs on this machine, or on machines that share a file system with it.

Each file imports only from the files above it:

base             jobs, events, engines, and error messages for faults of the machine
child            the main program of a process for one task
local            processes on this machine
orphan           end a fork server whose parent process has died
dask_cluster     a Dask cluster
slurm            a Slurm cluster
"""
