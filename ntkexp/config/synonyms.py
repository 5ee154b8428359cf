"""What others call our keys and options: the words of papers and of other libraries, with ours.

They are accepted nowhere: one experiment has one spelling, and a message names it.
"""

from __future__ import annotations

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    name: ours
    for ours, names in {
        "optimizer.step_size": "lr learning_rate eta step_length",
        "optimizer.batch": "batch_size bs minibatch mini_batch batchsize",
        "optimizer.weight_decay": "wd l2 l2_reg regularisation regularization",
        "optimizer.clip_norm": "grad_clip clip max_norm max_grad_norm gradient_clip_val",
        "optimizer.betas": "beta1 beta2 beta",
        "optimizer": "opt optim solver",
        "optimizer=momentum": "sgd_momentum heavy_ball",
        "optimizer=nesterov": "nesterov",
        "optimizer=adam": "adam",
        "optimizer=sgd": "sgd",
        "schedule": "scheduler lr_schedule lr_scheduler",
        "schedule.warm_up": "warmup warmup_steps",
        "steps": "epochs epoch n_epochs num_epochs iterations iters n_iter max_iter max_iters num_iterations updates",
        "model": "net network arch architecture",
        "model.width": "hidden hidden_dim hidden_size hidden_units units neurons channels d_model n_hidden",
        "model.depth": "n_layers num_layers hidden_layers",
        "model.activation": "nonlinearity act activation_function phi",
        "model.activation=relu": "relu",
        "model.activation=tanh": "tanh",
        "model.kernel": "kernel_size filter_size",
        "init.W_std": "sigma_w w_std weight_std",
        "init.b_std": "sigma_b bias_std",
        "loss": "criterion objective loss_fn",
        "data": "dataset data_set task",
        "data.train": "n_train num_train train_size n_samples train_samples",
        "data.test": "n_test num_test test_size",
        "data.path": "csv file filename data_file",
        "data.target": "label label_column target_column y",
        "seed": "random_seed random_state rng",
        "dtype": "precision",
        "device": "gpu cuda",
        "threads": "n_threads num_threads n_jobs",
    }.items()
    for name in names.split()
}
"""By the last part of a key, in small letters: the key that is meant, or the key with its value."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    group: {name: ours for ours, names in table.items() for name in names.split()}
    for group, table in {
        "loss": {
            "squared": "mse l2 square squared_error mean_squared_error quadratic mseloss ls",
            "cross_entropy": "ce xent nll softmax crossentropy crossentropyloss categorical_crossentropy",
            "logistic": "bce binary_cross_entropy binary_crossentropy logloss sigmoid bcewithlogitsloss",
            "hinge": "svm",
        },
        "model": {
            "mlp": "fc fcn dense fully_connected feedforward feed_forward",
            "cnn": "conv convnet lenet vgg",
            "transformer": "gpt vit attention",
            "huggingface": "hf gpt2 bert",
            "module": "torch pytorch custom",
        },
        "optimizer": {
            "momentum": "sgd_momentum sgdm heavy_ball",
            "nesterov": "nag",
            "gd": "full_batch gradient_descent batch_gd",
            "flow": "gradient_flow ode",
        },
        "data": {
            "cifar10": "cifar cifar_10",
            "fashion_mnist": "fmnist fashionmnist",
            "table": "csv parquet pandas",
        },
        "init": {"ntk": "ntk_parametrisation lecun", "standard": "sp kaiming he pytorch", "mean_field": "mup mf"},
        "schedule": {"constant": "none fixed", "cosine": "cos cosine_annealing", "step": "multistep steplr"},
    }.items()
}
"""By their groups, in small letters: the option that is meant."""
