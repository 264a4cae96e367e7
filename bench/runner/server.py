"""`vllm serve` in a process of its own, gone with the block and with this process; and what its processes hold."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_specrollout.config import envs

from . import leash
from .engine_process import EngineFailed

NAME = "policy"
"""Under which the model is served."""
VLLM = Path(sys.executable).with_name("vllm")
FRONT_END, WORKER, DRAFTER = "front end", "worker", "drafter"
_ROLES = {
    "VLLM::EngineCore": "engine core",
    "VLLM::Worker": WORKER,
    "vllm_specrollout.worker.drafter_process": DRAFTER,
    "resource_tracker": "resource tracker",
}
"""Part of a process's command line -> what it is for."""
_START_S, _END_S = 600.0, 60.0
_LOG_LINES = 40


@dataclass(slots=True)
class Server:
    """One that runs."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def serve(
    model: Path, flags: Sequence[str], spec_rollout: dict[str, Any] | None, *, is_verbose: bool
) -> Iterator[Server]:
    """A healthy server.

    Args:
        flags: further ones of `vllm serve`.
        spec_rollout: our configuration; None: stock, without our plugin.

    Raises:
        EngineFailed: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [] if spec_rollout is None else ["--spec-rollout", json.dumps(spec_rollout)]
    command = [str(VLLM), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != envs.SPEC_ROLLOUT}
    environment |= {"VLLM_PLUGINS": "none" if own == [] else "spec_rollout", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {envs.CPU_ATTN_SPLIT_KV: "0"}
    if not is_verbose:
        # it would say a line for every request, for hours
        environment["VLLM_LOGGING_LEVEL"] = "WARNING"
        flags = [*flags, "--uvicorn-log-level", "warning"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        output = sys.stderr if is_verbose else log
        process, held = leash.spawn([*command, "--served-model-name", NAME, *flags, *own], environment, output)
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            _wait_until_healthy(server, log)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                # the front end alone: it ends the others, and their history is written out
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            held.end()
            process.wait()


def _wait_until_healthy(server: Server, log: Any) -> None:
    end = time.monotonic() + _START_S
    while server.is_alive and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.address}/health", timeout=5):
            return
        time.sleep(0.5)
    log.seek(0)
    tail = "\n".join(f"    {line}" for line in log.read().splitlines()[-_LOG_LINES:])
    raise EngineFailed(f"the server did not start:\n{tail}", "run again with `--verbose`")


@dataclass(slots=True, kw_only=True)
class Holding:
    """Of all processes of one role together."""

    processes: int = 0
    rss_mib: float = 0.0
    # open files, pipes and the like
    files: int = 0
    # open sockets; a front end has one for each client
    sockets: int = 0


def holdings(root: int) -> dict[str, Holding]:
    """Role -> what its processes hold: of a server by its process id, and of all that it started."""
    found: dict[str, Holding] = {}
    for role, process in family(root):
        with contextlib.suppress(psutil.Error):
            rss, handles = process.memory_info().rss, process.num_fds()
            sockets = len(process.net_connections("all"))
            own = found.setdefault(role, Holding())
            own.processes, own.rss_mib = own.processes + 1, own.rss_mib + rss / 2**20
            own.files, own.sockets = own.files + handles - sockets, own.sockets + sockets
    return found


def family(root: int) -> list[tuple[str, psutil.Process]]:
    """A process and all that descend from it, each with what it is for; none once it is gone."""
    found = []
    with contextlib.suppress(psutil.Error):
        front_end = psutil.Process(root)
        found.append((FRONT_END, front_end))
        for process in front_end.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                found.append((next((role for part, role in _ROLES.items() if part in line), "others"), process))
    return found


def disk_bytes(folder: Path) -> int:
    """Of all files in a folder; 0 where there is none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total
