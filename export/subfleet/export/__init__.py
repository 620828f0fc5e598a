"""A submodel to a training step and an inference model that stock runtimes run, verified against PyTorch."""
