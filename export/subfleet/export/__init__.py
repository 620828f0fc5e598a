"""Exports a submodel as a training step and an inference model for stock runtimes, verified against PyTorch."""
