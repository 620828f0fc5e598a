"""Programs for virtual fleets: from the cache where they are, from worker processes where they are not."""

from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType

from subfleet.export.cache import CacheFolder, ExportCache
from subfleet.export.pool import ExportPool
from subfleet.export.requests import AnyRequest, EvaluateRequest, InferRequest, PriceRequest, TrainRequest

__all__ = ["AwaitedExports"]


class AwaitedExports:
    """The exporter of a logical clock: `finish` waits until all that was asked for is there, in no logical time.

    Nothing is answered before that, so that it makes no difference what the cache had. Worker processes start with the
    first request that the cache does not answer: where everything was exported before, there are none. Close it, or use
    it as a context manager.

    Args:
        cache: where results are kept.
        workers: processes, where any are needed.
        timeout_s: the longest that one export may take.

    Raises:
        FileError: the folder cannot be made.
    """

    def __init__(self, cache: CacheFolder, *, workers: int = 1, timeout_s: float = 300.0) -> None:
        self._folder = cache
        self._cache = ExportCache(cache)
        self._workers = workers
        self._timeout_s = timeout_s
        self._pool: ExportPool | None = None
        self._asked: list[tuple[Future[Path], Future[Path]]] = []  # the exporter's, and ours that waits for it

    def __enter__(self) -> "AwaitedExports":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def submit_training(self, request: TrainRequest) -> "Future[Path]":
        """See `Exports.submit_training`."""
        return self._answer(self._found(request) or self._open_pool().submit_training(request))

    def submit_evaluation(self, request: EvaluateRequest) -> "Future[Path]":
        """See `ExportPool.submit_evaluation`."""
        return self._answer(self._found(request) or self._open_pool().submit_evaluation(request))

    def submit_inference(self, request: InferRequest, weights_path: Path, *, samples_from: str = "") -> "Future[Path]":
        """See `Exports.submit_inference`."""
        found = self._found(request)
        if found is None:
            found = self._open_pool().submit_inference(request, weights_path, samples_from=samples_from)
        return self._answer(found)

    def submit_prices(self, request: PriceRequest) -> "Future[Path]":
        """See `Exports.submit_prices`."""
        return self._answer(self._found(request) or self._open_pool().submit_prices(request))

    def finish(self) -> None:
        """Wait for everything that was asked for; each export has its own deadline."""
        asked, self._asked = self._asked, []
        wait([exported for exported, _ in asked])
        for exported, answer in asked:
            error = exported.exception()
            if error is None:
                answer.set_result(exported.result())
            else:
                answer.set_exception(error)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def _answer(self, exported: "Future[Path]") -> "Future[Path]":
        answer: Future[Path] = Future()
        self._asked.append((exported, answer))
        return answer

    def _found(self, request: AnyRequest) -> "Future[Path] | None":
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
