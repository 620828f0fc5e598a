"""The headroom of the game's task, measured by `headroom.py`."""

import argparse
from dataclasses import replace

import numpy as np
from headroom import Task, train_best

from liar_benchmark.games import LEARNED, MODEL, SMALLEST, create_run, load_data

__all__ = ["describe_headroom"]


def describe_headroom() -> list[str]:
    """The accuracies of the largest, the smallest and a linear model, each trained on all samples in one place."""
    run = create_run("fedavg", 1, 1)
    data = load_data(1)
    task = Task(run=run, train=data.take(np.arange(LEARNED)), test=data.take(np.arange(LEARNED, len(data))))
    options = argparse.Namespace(rates=[0.02, 0.05, 0.1], linear_rates=[0.005, 0.02], epochs=20, batch_size=32)
    small = replace(MODEL, widths=(round(SMALLEST * MODEL.widths[0]),))
    models = {"largest": run, "smallest": replace(run, model=small, rates=(1.0,)), "linear": None}
    accuracies = [
        f"{name} {100 * train_best(task, name, model_run, options).accuracy:.1f} %"
        for name, model_run in models.items()
    ]
    return [f"Headroom, each trained on all samples in one place: {', '.join(accuracies)}."]
