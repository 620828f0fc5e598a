"""Parts of the benchmark of training steps; `benchmarks/train_step.py` puts them together."""
