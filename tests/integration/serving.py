"""`vllm serve`, and programs with engines, as processes of their own for tests that look at them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).parents[2]
JSON = {"Content-Type": "application/json"}
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


def ask(address: str, path: str, body: Any = None, headers: Mapping[str, str] = JSON) -> tuple[int, Any]:
    """Status and answer of a GET, or of a POST with this body."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, dict(headers)), timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def counters(address: str) -> dict[str, float]:
    """vLLM's own, of drafts."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    return {name: float(value) for name, value in re.findall(r"^vllm:spec_decode_(\w+)_total\{.*\} (\S+)$", text, re.M)}


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    """What a program printed behind RESULT."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


def run_beside(module: str, *arguments: str | Path, **more: str) -> Any:
    """The result of a module of this folder, whose engine is in processes of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **more,
    }
    command = [sys.executable, "-m", f"tests.integration.{module}", *arguments]
    return result_of(subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600))
