"""`vllm serve` in a process of its own, as its users begin it; gone with the block, and with this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_specrollout.config import envs

from ..runner.engine_process import EngineFailed
from ..runner.leash import Leash

NAME = "policy"
"""Under which the model is served."""
VLLM = Path(sys.executable).with_name("vllm")
_START_S, _END_S = 600.0, 60.0
_LOG_LINES = 40
_PLUGIN = "spec_rollout"


@dataclass(slots=True)
class Server:
    """One that runs."""

    address: str
    pid: int
    process: subprocess.Popen[bytes]
    # the end of its log: a file would grow as long as it lives
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))

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
    environment |= {"VLLM_PLUGINS": "none" if spec_rollout is None else _PLUGIN, "VLLM_NO_USAGE_STATS": "1"}
    environment |= {envs.CPU_ATTN_SPLIT_KV: "0"}
    told, output = os.pipe()
    process = start([*command, "--served-model-name", NAME, *flags, *own], environment, output)
    os.close(output)
    leash = Leash(process.pid)
    server = Server(f"http://127.0.0.1:{port}", process.pid, process)
    reader = threading.Thread(target=_read, args=(server, told, is_verbose), daemon=True)
    reader.start()
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            # the front end alone: it ends the others, and their history is written out
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        leash.end()
        process.wait()
        reader.join(5.0)


def start(program: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Python with these arguments, in a session of its own; both its outputs go to a descriptor."""
    return subprocess.Popen(
        [sys.executable, *program],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _read(server: Server, told: int, is_verbose: bool) -> None:
    with open(told, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            server.log.append(line.rstrip())
            if is_verbose:
                print(line.rstrip(), file=sys.stderr)


def _wait_until_healthy(server: Server) -> None:
    end = time.monotonic() + _START_S
    while server.is_alive and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.address}/health", timeout=5):
            return
        time.sleep(0.5)
    tail = "\n".join(f"    {line}" for line in server.log)
    raise EngineFailed(f"the server did not start:\n{tail}", "run again with `--verbose`")
