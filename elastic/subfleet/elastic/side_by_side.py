"""Runs jobs on several threads; for work that releases the interpreter's lock."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["run_until_one_fails"]


def run_until_one_fails(jobs: Iterable[Callable[[], bool]], thread_count: int) -> None:
    """Run jobs in turn, or side by side where there are several threads.

    After a job that returns False no other is started; those that run are waited for.
    """
    left = deque(jobs)
    if thread_count == 1:
        _work(left)
        return
    with ThreadPoolExecutor(thread_count) as pool:
        for worker in [pool.submit(_work, left) for _ in range(thread_count)]:
            worker.result()


def _work(left: deque[Callable[[], bool]]) -> None:
    while left:
        try:
            job = left.popleft()
        except IndexError:
            # Another thread took the last one.
            return
        if not job():
            left.clear()
