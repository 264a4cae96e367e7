"""A thread for what may wait for a disk, which nobody waits for longer than a patient person would.

`concurrent.futures` has threads that the interpreter's end waits for, however long they take: one that waits for a disk
that stands still would keep the process alive.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from vllm_specrollout.observe.patience import PATIENCE_S, wait_for

P = ParamSpec("P")
T = TypeVar("T")
_Task = tuple[Future[Any], Callable[[], Any]]


class Background(Executor):
    """Runs tasks one at a time, in the order given. What is left at the interpreter's end is done, if it goes then."""

    def __init__(self, name: str, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # it knows the tasks alone, so that who forgets this object ends the thread
        self._thread = threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False
        _all.add(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Run what was given, and no more; with `wait`, until it is done or the thread no longer gets on."""
        while cancel_futures:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task[0].cancel()
        self._tasks.put(None)
        if wait:
            wait_for(self._thread, self._tasks.qsize, self._patience_s)


_all: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    for one in list(_all):
        one.shutdown()


def _run(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        # nothing that it holds is kept until the next one comes
        del task, future, call
