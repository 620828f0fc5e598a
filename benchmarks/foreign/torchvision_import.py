"""Imports torchvision, also with a PyTorch without CUDA."""

from types import ModuleType

import torch

__all__ = ["import_models"]

_UNCOMPILED = ("nms", "qnms")
"""Detection operators that must be declared for torchvision's import. No network here calls them."""


def import_models() -> ModuleType:
    """Import `torchvision.models`.

    PyPI's wheels are built for CUDA. With a PyTorch without it their compiled operators do not load, and the import
    fails because two declarations are missing. They are made here; all networks are Python.
    """
    try:
        from torchvision import models
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in _UNCOMPILED:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision import models
    return models
