"""Where the server computes: on the CPU, or on an accelerator."""

import torch

from subfleet.protocol.errors import ConfigError


def compute_device(name: str) -> torch.device:
    """The configured device, if it is available.

    Raises:
        ConfigError: PyTorch finds no such device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is 'cuda', but PyTorch {torch.__version__} finds no GPU here; install a build with CUDA and its "
            "driver, or leave device out"
        )
    return torch.device(name)
