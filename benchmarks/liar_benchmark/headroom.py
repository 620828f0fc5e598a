"""What the game's task leaves to gain, by `headroom.py`'s measure."""

import argparse
from dataclasses import replace

import numpy as np
from headroom import Task, trained

from liar_benchmark.games import LEARNED, MODEL, SMALLEST, data_of, run_of

__all__ = ["headroom_lines"]


def headroom_lines() -> list[str]:
    """The accuracies of the largest, the smallest and a linear model, each trained on all samples in one place."""
    run = run_of("fedavg", 1, 1)
    data = data_of(1)
    task = Task(run=run, train=data.take(np.arange(LEARNED)), test=data.take(np.arange(LEARNED, len(data))))
    asked = argparse.Namespace(rates=[0.02, 0.05, 0.1], linear_rates=[0.005, 0.02], epochs=20, batch_size=32)
    small = replace(MODEL, widths=(round(SMALLEST * MODEL.widths[0]),))
    models = {"largest": run, "smallest": replace(run, model=small, rates=(1.0,)), "linear": None}
    told = [f"{name} {100 * trained(task, name, one, asked).accuracy:.1f} %" for name, one in models.items()]
    return [f"Headroom, each trained on all samples in one place: {', '.join(told)}."]
