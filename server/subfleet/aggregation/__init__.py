"""The model of a run: checks of updates, aggregation, evaluation and checkpoints."""
