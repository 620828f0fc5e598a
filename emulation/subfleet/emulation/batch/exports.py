"""An exporter that starts worker processes only for programs that are not in the cache."""

from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from subfleet.export.cache import CacheFolder, ExportCache
from subfleet.export.pool import ExportPool
from subfleet.export.requests import AnyRequest


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

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        """See `ExportPool.submit`."""
        path = self._cache.find(request)
        if path is not None:
            future: Future[Path] = Future()
            future.set_result(path)
            return future
        if self._pool is None:
            self._pool = ExportPool(self._folder, workers=self._workers, timeout_s=self._timeout_s)
        return self._pool.submit(request, weights_path=weights_path, samples_from=samples_from)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._pool is not None:
            self._pool.close()
