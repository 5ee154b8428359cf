"""Writers and readers of the files in a run folder. They do not need torch.

Each module imports only from the modules listed before it:

atomic, own_files                    atomic files, locks and seals; removal of this package's files
sealed_log, schema                   append-only logs; the schema of each file
folder, array_schema, results        the state of a run folder; the schema of arrays; CSV files
data, kernels                        examples; tangent kernels, path kernels and predictions
diagnostics, recorded                arrays of diagnostics; outputs and weights along the path
contributions, ground_truth          contributions, effects and removals; outputs after retraining
kernel_file, sweep, claim            kernel files; sweeps; verdicts on claims
register                             the register of claims
"""
