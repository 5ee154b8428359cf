"""Tables, sentences and pictures of finished runs, from their files alone,
without torch.

Each module imports only from the modules listed before it:

progress, live_log                       progress bars; logs in W&B, MLflow and TensorBoard
run, tables, outputs, leave_out          reader of a run folder; tables; outputs; leave-out checks
examples, inventory, sentence, claims    names of examples; folders of runs; results in words
run_list                                 the list of runs with their numbers
analysis                                 statistics over several runs: estimates, scaling laws
comparison, material, validation         runs side by side; content of a report; LDS and QLD
parts, known_effects                     contributions to one output; leave-out effects
removal_group, explain, forgetting       examples to remove; explanations; forgetting
explain_attribution                      an explanation without a run folder
breakdown                                breakdown of a removal by example and step
top_examples, plots                      tables and figures of the strongest examples
scores                                   contributions with scores, pictures, notebook display
loaded_run, loaded_sweep                 `ntkexp.load_run`, `ntkexp.load_sweep`
drawing, events, page                    pictures at the end of a run; TensorBoard; HTML pages
"""
