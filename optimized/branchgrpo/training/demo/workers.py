"""Worker processes with one thread each, and the messages by which they tell of their progress."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self

import torch

from branchgrpo.training.digits_threads import one_thread

ProgressCallback = Callable[[str, int, int], None]
"""Called with (name of the task, units done, units in all)."""

_messages: Any = None


@dataclass(frozen=True)
class Task:
    """A function of this package and its arguments; called as ``function(*arguments, on_progress)``.

    ``on_progress`` takes (units done, units in all).
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def start_worker(messages: Any) -> None:
    """Prepare a worker process: one thread, and where its messages go."""
    global _messages
    torch.set_num_threads(1)
    _messages = messages


def run_in_worker(task: Task) -> Any:
    """Run one task in a worker process, its progress sent to the parent."""
    return task.function(*task.arguments, lambda done, total: _messages.put((task.name, done, total)))


def run_here(task: Task, on_progress: ProgressCallback) -> Any:
    """Run one task in this process."""
    with one_thread():
        return task.function(*task.arguments, lambda done, total: on_progress(task.name, done, total))


class Pool:
    """Runs tasks in worker processes, or in this process if only one is asked for; the results are the same.

    Use it as a context manager.
    """

    def __init__(self, workers: int) -> None:
        self.executor: ProcessPoolExecutor | None = None
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
            # written by the caller of put itself: a task's messages are there before its result is
            self.messages = context.SimpleQueue()
            self.executor = ProcessPoolExecutor(workers, context, start_worker, (self.messages,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: Sequence[Task], on_progress: ProgressCallback) -> list[Any]:
        """Results in the order of the tasks; the first error of a task is raised, with the others cancelled."""
        if self.executor is None:
            return [run_here(task, on_progress) for task in tasks]
        futures = [self.executor.submit(run_in_worker, task) for task in tasks]
        running = set(futures)
        while running:
            running = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION).not_done
            self.pass_on(on_progress)
            raise_first_error(futures)
        return [future.result() for future in futures]

    def pass_on(self, on_progress: ProgressCallback) -> None:
        """Hand the messages that are there to the callback."""
        while not self.messages.empty():
            on_progress(*self.messages.get())


def raise_first_error(futures: Sequence[Future[Any]]) -> None:
    """Raise what a finished task raised, after cancelling the rest."""
    for future in futures:
        if future.done() and not future.cancelled() and future.exception() is not None:
            for other in futures:
                other.cancel()
            future.result()
