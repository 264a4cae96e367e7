"""What may wait for a disk is done in order, and nobody waits longer for it than for anything to happen."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.history import HistoryDrafter
from vllm_specrollout.history.background import Background

PATIENCE_S = 60  # no test waits so long unless it fails


def test_tasks_run_in_the_order_given_and_their_errors_are_their_futures() -> None:
    background, seen = Background("a"), list[int]()
    futures = [background.submit(seen.append, number) for number in range(50)]
    failed = background.submit(lambda: [][1])
    assert futures[-1].result(PATIENCE_S) is None and seen == list(range(50))
    with pytest.raises(IndexError):
        failed.result(PATIENCE_S)
    background.shutdown()
    assert not background._thread.is_alive()


def test_shutting_down_waits_for_no_task_that_stands_still_and_cancels_the_others() -> None:
    background, go, is_asked = Background("a", patience_s=0.0), threading.Event(), threading.Event()

    def stand_still() -> bool:
        is_asked.set()
        return go.wait(PATIENCE_S)

    first, second = background.submit(stand_still), background.submit(lambda: None)
    assert is_asked.wait(PATIENCE_S)
    background.shutdown(cancel_futures=True)
    assert not go.is_set() and second.cancelled() and not first.done()
    go.set()
    assert first.result(PATIENCE_S)


def test_a_background_that_is_forgotten_ends_its_thread() -> None:
    background = Background("a")
    thread, gone = background._thread, weakref.ref(background)
    del background
    gc.collect()
    thread.join(PATIENCE_S)
    assert gone() is None and not thread.is_alive()


def test_a_drafter_waits_for_its_disk_on_threads_that_keep_no_process_alive() -> None:
    before = set(threading.enumerate())
    drafter = HistoryDrafter(HistoryConfig())
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    drafter.close()


@pytest.mark.parametrize(("task", "said"), [("print('written')", "written"), ("threading.Event().wait()", "")])
def test_the_interpreters_end_waits_for_what_gets_on_alone(task: str, said: str) -> None:
    code = f"""
import threading
from vllm_specrollout.history.background import Background
background = Background("a", patience_s=0.2)
background.submit(lambda: {task})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == said and not done.stderr
