"""An exporter that starts worker processes only for programs that are not in the cache."""

from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from subfleet.export.cache import CacheFolder, ExportCache
from subfleet.export.pool import ExportPool
from subfleet.export.requests import AnyRequest, EstimateRequest, EvaluateRequest, InferRequest, TrainRequest


class LazyExports:
    """An exporter that starts its worker processes with the first request that the cache cannot answer.

    Close it, or use it as a context manager.

    Args:
        cache: of exported programs.
        workers: number of worker processes.
        timeout_s: the most seconds that one export may take.

    Raises:
        FileError: the folder of the cache cannot be created.
    """

    def __init__(self, cache: CacheFolder, *, workers: int = 1, timeout_s: float = 300.0) -> None:
        self._folder = cache
        self._cache = ExportCache(cache)
        self._workers = workers
        self._timeout_s = timeout_s
        self._pool: ExportPool | None = None

    def __enter__(self) -> "LazyExports":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def submit_training(self, request: TrainRequest) -> "Future[Path]":
        """See `Exports.submit_training`."""
        return self._find(request) or self._open_pool().submit_training(request)

    def submit_evaluation(self, request: EvaluateRequest) -> "Future[Path]":
        """See `ExportPool.submit_evaluation`."""
        return self._find(request) or self._open_pool().submit_evaluation(request)

    def submit_inference(self, request: InferRequest, weights_path: Path, *, samples_from: str = "") -> "Future[Path]":
        """See `Exports.submit_inference`."""
        cached = self._find(request)
        return cached or self._open_pool().submit_inference(request, weights_path, samples_from=samples_from)

    def submit_estimates(self, request: EstimateRequest) -> "Future[Path]":
        """See `Exports.submit_estimates`."""
        return self._find(request) or self._open_pool().submit_estimates(request)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def _find(self, request: AnyRequest) -> "Future[Path] | None":
        path = self._cache.find(request)
        if path is None:
            return None
        future: Future[Path] = Future()
        future.set_result(path)
        return future

    def _open_pool(self) -> ExportPool:
        if self._pool is None:
            self._pool = ExportPool(self._folder, workers=self._workers, timeout_s=self._timeout_s)
        return self._pool
