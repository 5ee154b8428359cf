"""Tables, sentences and pictures of finished runs, from their files alone, without torch.

Each line imports only from the lines above it:

progress, live_log                         the numbers of a training that is running
run, tables, outputs, leave_out            the reader of a run; tables as text, CSV and HTML; outputs; removals
examples, inventory, sentence, claims      names of examples; configurations and results in words
analysis                                   numbers of several runs: estimates, laws, tables
comparison, material, validation           runs side by side, and their summary
parts, known_effects                       parts of one output; its leave-out effects
removal_group, explain, forgetting         the group of a removal; explanations of a prediction and of forgetting
breakdown                                  the breakdown of a removal
top_examples, plots                        tables and figures of the strongest examples, and their files
scores                                     contributions with scores, pictures and a notebook display
loaded_run                                 a run with pictures and a notebook display: `ntkexp.load_run`
drawing, events, page                      pictures at the end of a run, TensorBoard, HTML pages
"""
