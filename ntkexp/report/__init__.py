"""Tables, sentences and pictures of finished runs, from their files alone, without torch.

Each line imports only from the lines above it:

progress, live_log                         progress bars, and logs (W&B, MLflow, TensorBoard) of a training run
run, tables, outputs, leave_out            the reader of a run folder; tables; selection of outputs; leave-out checks
examples, inventory, sentence, claims      names of examples; lists of runs; results and claims in words
analysis                                   statistics over several runs: estimates, scaling laws, tables
comparison, material, validation           runs side by side; the content of a report; its validation
parts, known_effects                       contributions to one output; its leave-out effects
removal_group, explain, forgetting         the examples to remove; explanations of a prediction and of forgetting
breakdown                                  the breakdown of a removal by example and step
top_examples, plots                        tables and figures of the strongest examples, and their files
scores                                     contributions with scores, pictures and a notebook display
loaded_run                                 a run with pictures and a notebook display: `ntkexp.load_run`
drawing, events, page                      pictures at the end of a run, TensorBoard, HTML pages
"""
