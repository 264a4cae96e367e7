import threading

from vllm_specrollout.observe.patience import wait_for

PATIENCE_S = 60  # no test waits so long unless it fails


def test_who_gets_on_is_waited_for() -> None:
    go, left = threading.Event(), [3]
    thread = threading.Thread(target=go.wait, args=(PATIENCE_S,))
    thread.start()
    waits: list[int] = []

    def progress() -> int:
        waits.append(left[0])
        left[0] -= left[0] > 0
        return left[0]

    assert not wait_for(thread, progress, patience_s=0.0) and waits == [3, 2, 1, 0]
    go.set()
    assert wait_for(thread, lambda: 0, PATIENCE_S)
