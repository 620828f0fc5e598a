"""Workers of a batch on a Ray cluster, which may be several machines. Needs the extra `ray` there and here.

Programs, weights and samples travel through Ray's object store, each once. Ray unpickles what comes back, so a cluster
must be as trusted as this process.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from subfleet.edge_client.task_work import Outcome, TrainingOutput
from subfleet.emulation.batch.workers import MOST_DEATHS, Order
from subfleet.protocol.errors import ConfigError, MissingExtraError, RunError

LOCAL = "local"
"""The address that starts a cluster on this machine, for as long as the run takes."""


class RayPool:
    """A connection to a Ray cluster, on which tasks are done; see `WorkerPool`. A context manager that ends it.

    Args:
        address: of the cluster, such as "auto" for one that runs on this machine, "ray-head:6379", or `LOCAL`.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster at the address.
    """

    def __init__(self, address: str) -> None:
        self._ray = _load_ray()
        try:
            self._ray.init(
                address=None if address == LOCAL else address,
                log_to_driver=False,
                logging_level="ERROR",
                include_dashboard=False if address == LOCAL else None,
            )
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {address!r} ({error!s:.200}); start one with `ray start --head`, or name "
                f"{LOCAL!r} to start one for the run"
            ) from error
        self._do: Any = self._ray.remote(max_retries=MOST_DEATHS, retry_exceptions=False)(do_remotely)
        self._shared: dict[Path, Any] = {}

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def begin(self, order: Order) -> Callable[[], Outcome]:
        """Begin a task; see `ClientWork.begin`."""
        self._shared = {path: reference for path, reference in self._shared.items() if path.exists()}
        files = list(order.files)
        reference = self._do.remote(order, *(self._share(path) for path in files))
        return partial(self._wait, order, reference)

    def _share(self, path: Path) -> Any:
        """The reference of a file's content in the object store."""
        if path not in self._shared:
            self._shared[path] = self._ray.put(path.read_bytes())
        return self._shared[path]

    def _wait(self, order: Order, reference: Any) -> Outcome:
        task = order.task
        try:
            outcome, content = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(
                f"the Ray cluster has not done task {task.task_id!r} of {task.client_id} ({reason:.300}); see its logs"
            ) from error
        if isinstance(outcome, TrainingOutput):
            outcome = replace(outcome, output_path=order.means.folder / outcome.output_path.name)
            outcome.output_path.write_bytes(content)
        done: Outcome = outcome
        return done


def do_remotely(order: Order, *contents: bytes) -> tuple[Outcome, bytes]:
    """Do a task on a machine that has none of its files.

    Args:
        order: the task, with the paths of another machine.
        contents: of its files, in their order.

    Returns:
        The outcome, and the content of a training's output; empty without any.
    """
    with tempfile.TemporaryDirectory(prefix="subfleet-") as name:
        folder = Path(name)
        for path, content in zip(order.files, contents, strict=True):
            (folder / path.name).write_bytes(content)
        outcome = order.move_to(folder).do()
        return outcome, outcome.output_path.read_bytes() if isinstance(outcome, TrainingOutput) else b""


def _load_ray() -> ModuleType:
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "ray", "ray") from error
    module: ModuleType = ray
    return module
