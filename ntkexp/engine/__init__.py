"""Engines run jobs on this machine, or on machines that share a file system with it.

Each module imports only from the modules listed before it:

base             jobs, events, engines, and error messages for faults of the machine
child            the main program of a process for one task
local            processes on this machine
orphan           end a fork server whose parent process has died
dask_cluster     a Dask cluster
slurm            a Slurm cluster
"""
