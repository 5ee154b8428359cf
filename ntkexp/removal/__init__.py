"""Train again without some examples, and split the change
of the outputs over these examples.

Each module imports only from the modules listed before it:

between        the breakdown of the difference between two recorded training runs
retraining     leave-out effects by retraining, and the check of estimated effects
rerun          retraining of a run
"""
