"""The model after a round as a safetensors file, which is never partial."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save

from subfleet.protocol.disks import write_atomically
from subfleet.protocol.errors import FileError, explain_os_errors


def checkpoint_path(folder: Path, round_number: int) -> Path:
    """The file of the model after a round."""
    return folder / f"round-{round_number:06d}.safetensors"


def save_checkpoint(folder: Path, round_number: int, state: Mapping[str, torch.Tensor]) -> str:
    """Write a model durably; returns its SHA-256. The bytes depend on names and values alone.

    Raises:
        FileError: the folder cannot be written.
    """
    content = save({name: state[name].cpu().contiguous() for name in sorted(state)}, {"round": str(round_number)})
    path = checkpoint_path(folder, round_number)
    with explain_os_errors(f"checkpoint {path} cannot be written", "make room for it"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [content])
    return hashlib.sha256(content).hexdigest()


def load_checkpoint(folder: Path, round_number: int, sha256: str) -> dict[str, torch.Tensor]:
    """Read a model back.

    Raises:
        FileError: it is missing or damaged.
    """
    path = checkpoint_path(folder, round_number)
    with explain_os_errors(f"checkpoint {path} cannot be read", "restore it from a backup"):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise FileError(f"checkpoint {path} is damaged: its sha256 must be {sha256}; restore it from a backup")
    return load(content)


def prune_checkpoints(folder: Path, *, keep_from: int, rounds: Collection[int] = ()) -> None:
    """Remove the checkpoints of rounds before `keep_from`, except those in `rounds`."""
    for path in folder.glob("round-*.safetensors"):
        number = path.stem.removeprefix("round-")
        if number.isdigit() and int(number) < keep_from and int(number) not in rounds:
            path.unlink(missing_ok=True)
