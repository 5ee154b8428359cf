"""One run: its setting, its steps, its results and its folder.

Each module imports only from the modules listed before it:

environment          threads, device, determinism, clock
setting              data, initial weights, memory plan and step size
metrics              the metrics of each step
state                weights, accumulated sums and the checkpoint
outcome              the ending, kernel machines, error bars and leave-out effects
loop                 the training loop, its backward passes and callbacks
folder_listener      callbacks that write the run folder
execute              start, resume or repeat a run in its folder
"""
