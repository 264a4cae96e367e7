"""Python processes that begin with vLLM imported: its import takes longer than most of what tests do with an engine.

They are forked from one that has imported vLLM and nothing of ours, and else are what they would be: with a session,
an environment, files and arguments of their own. What they start in turn is forked from them. The way in which users
start processes is test_server.py's and test_first_hour.py's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Read while vLLM is imported; and a process with threads must not be forked."""


class _Source:
    """Has vLLM imported; gone with this process."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            program = ["-P", str(Path(__file__).with_name("warm_process.py")), str(other.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, *program],
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self._close)

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(files))
        return json.loads(self._socket.recv(1 << 10))

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


_source = cache(_Source)


class Process:
    """As `subprocess.Popen` of Python, as far as tests need it.

    Args:
        program: Python's arguments: a file or `-c` with code, after `-P` if need be, and theirs.
        output: descriptors of both its outputs.
        pass_fds: further files that it has under the same numbers.
    """

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        output: tuple[int, int],
        pass_fds: Sequence[int] = (),
        folder: Path | None = None,
        has_session: bool = False,
    ) -> None:
        with open(os.devnull) as nothing:
            files = {0: nothing.fileno(), 1: output[0], 2: output[1], **{number: number for number in pass_fds}}
            request = {
                "program": list(program),
                "environment": dict(environment),
                "folder": str(folder or Path.cwd()),
                "files": list(files),
                "has_session": has_session,
            }
            self.pid: int = _source().ask(request, list(files.values()))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _source().ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a warm process", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    program: Sequence[str], environment: Mapping[str, str], folder: Path | None = None, timeout: float = float("inf")
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of Python, its outputs captured."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        process = Process(program, environment, (out.fileno(), error.fileno()), folder=folder)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = [file.seek(0) or file.read() for file in (out, error)]
    return subprocess.CompletedProcess(list(program), code, *texts)


class _Subprocess:
    """Stands in for `subprocess` where engine processes are started."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(command: Sequence[str], **options: Any) -> Any:
        if command[0] != sys.executable:
            return subprocess.Popen(command, **options)
        output = options["stdout"].fileno()
        return Process(command[1:], options["env"], (output, output), options["pass_fds"], has_session=True)


@contextlib.contextmanager
def engine_processes() -> Iterator[None]:
    """Meanwhile, the benchmarks' engine processes are warm."""
    from bench.runner import leash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leash, "subprocess", _Subprocess)
        yield
