"""The files of a run folder, and how they are written and read, without torch.

Each line imports only from the lines above it:

atomic, own_files                    files that survive a kill, seals; removal of a package's own files
sealed_log, schema                   logs that survive a kill; the schema of every file
folder, array_schema, results        the state of a run folder; the schema of arrays; the CSV files of a run
data, kernels                        the examples; tangent kernels, path kernels and predictions
contributions, ground_truth          contributions, effects and removals; trainings without examples
kernel_file, sweep, claim            kernel files; sweeps; verdicts on claims
register                             the register of claims
"""
