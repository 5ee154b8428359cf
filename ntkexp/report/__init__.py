"""Tables, sentences and pictures of finished runs, from their files alone, without torch.

Each line imports only from the lines above it:

progress, live_log                         the numbers of a training that is running
run, tables, outputs, leave_out            the reader of a run; tables as text, CSV and HTML; outputs; removals
examples, inventory, sentence, claims      names of examples; configurations and results in words
analysis                                   numbers of several runs: estimates, laws, tables
comparison, material, validation           runs side by side, and their summary
components, positions, top_examples        parts of a contribution
explain, ledger, forgetting                explanations of a prediction, of a removal and of forgetting
plots                                      figures, and their files
scores                                     contributions with scores, pictures and a notebook display
loaded_run                                 a run with pictures and a notebook display: `ntkexp.load_run`
drawing, events, page                      pictures at the end of a run, TensorBoard, HTML pages
"""
