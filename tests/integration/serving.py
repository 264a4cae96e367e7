"""`vllm serve` as a process of its own, for tests that talk to it from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests import warm

VLLM = Path(sys.executable).with_name("vllm")


def environment() -> dict[str, str]:
    return {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOG_STATS_INTERVAL": "1"}


@contextlib.contextmanager
def serve(model: str, log: Path, *flags: str, is_warm: bool = True) -> Iterator[str]:
    """The address of a server that is gone when the block ends; the model is served as `tiny`.

    Args:
        is_warm: begun with vLLM imported, which is sooner; else as users begin it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [str(VLLM), "serve", model, "--port", str(port), "--enforce-eager", "--served-model-name", "tiny", *flags]
    process: subprocess.Popen[bytes] | warm.Process
    with log.open("w") as out:
        if is_warm:
            process = warm.Process(command, environment(), (out.fileno(), out.fileno()))
        else:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment())
    try:
        _wait_until_healthy(process, address, log)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_healthy(process: subprocess.Popen[bytes] | warm.Process, address: str, log: Path) -> None:
    for _ in range(300):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
