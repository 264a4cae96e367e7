"""The processes of a group, as the driver sees them: begun, watched, ended. Their own code is in `worker.rollout`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_specrollout.cluster.child import Restarts
from vllm_specrollout.cluster.group.coordinator import Rules
from vllm_specrollout.config import envs
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import ConfigError

logger = logging.getLogger("vllm.specrollout")

_END_S = 10.0


def begin_worker(
    name: str,
    cores: Sequence[int],
    engine: Mapping[str, Any],
    *,
    driver: str,
    coordinator: str,
    drafter: str,
    drafter_model: str,
) -> subprocess.Popen[bytes]:
    """One worker, on cores of its own.

    Args:
        engine: arguments of `vllm.LLM`.
        driver, coordinator, drafter: addresses; empty: there is none.
        drafter_model: what drafts there.
    """
    environment = {name: value for name, value in os.environ.items() if name != envs.SPEC_ROLLOUT}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # the process is bound to its cores itself
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(cores)),
    }
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(key, None)
    argv = ["-m", "vllm_specrollout.worker.rollout.process", name, "--parent", str(os.getpid()), "--driver", driver]
    argv += ["--coordinator", coordinator, "--drafter", drafter]
    argv += ["--drafter-model", drafter_model, "--cores", ",".join(map(str, cores))]
    return _begin([*argv, "--engine", json.dumps(engine)], environment)


class CoordinatorProcess:
    """The coordinator, begun anew when it has ended: it keeps nothing, and learns all from the workers' reports.

    One that ends too often is left, and the group goes on without: it costs help, and nothing else.

    Args:
        clock: seconds, from any zero.
    """

    def __init__(self, address: str, rules: Rules, clock: Callable[[], float] = time.monotonic) -> None:
        self._argv = [
            "-c",
            "from vllm_specrollout.cli import main; main()",
            "coordinator",
            *("--listen", address, "--mode", rules.mode, "--methods", ",".join(rules.methods)),
            *("--most", str(rules.most), "--silence-s", str(rules.silence_s), "--parent", str(os.getpid())),
        ]
        self.process = _begin(self._argv, dict(os.environ))
        self.is_given_up = False
        self._restarts = Restarts(clock)

    def watch(self) -> None:
        """Call it now and then."""
        if self.is_given_up:
            return
        if self._restarts.is_waiting:
            if self._restarts.is_due:
                self._begin_anew()
        elif self.process.poll() is not None:
            self._ended(f"ended with status {self.process.returncode}")

    def _begin_anew(self) -> None:
        try:
            self.process = _begin(self._argv, dict(os.environ))
        except OSError as error:
            # the host has no room for a process now: that costs a try
            self._ended(f"could not be begun: {error}")
        else:
            self._restarts.leave()

    def _ended(self, how: str) -> None:
        if self._restarts.ended():
            return
        self.is_given_up = True
        logger.warning(
            "Spec rollout: the coordinator %s, and was begun anew %d times: from now on idle workers help nobody; look"
            " at its own messages above",
            how,
            self._restarts.count,
        )


def shares_of(cores: int | Sequence[Sequence[int]]) -> list[list[int]]:
    """The cores of each worker."""
    if not isinstance(cores, int):
        shares = [list(share) for share in cores]
        if not shares or not all(shares):
            raise ConfigError(f"`cores` is {shares}", "name one core or more for each worker, as [[0, 1], [2, 3]]")
        return shares
    own = sorted(os.sched_getaffinity(0))
    check_range("cores", cores, 1, len(own))
    size, more = divmod(len(own), cores)
    ends = [i * size + min(i, more) for i in range(cores + 1)]
    return [own[begin:stop] for begin, stop in zip(ends, ends[1:], strict=False)]


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End them all; by force where they do not."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + _END_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.0))
        process.kill()
        process.wait()


def _begin(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # its own group: an interrupt from the keyboard reaches the driver, which ends it in order
    return subprocess.Popen(
        [sys.executable, *argv], env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
    )
