"""How the optimizers of PyTorch take in gradients, a file each."""
