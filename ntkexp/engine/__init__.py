"""Engines, which run jobs on this machine or on others that share a folder with it.

Each file imports only from the files above it:

base             jobs, events, engines, and the faults of a machine in words
child            a process for one task
local            processes on this machine
orphan           ends a fork server whose command has died
dask_cluster     a Dask cluster
slurm            a Slurm cluster
"""
