"""Imports vLLM once, then forks a process for every Python program that it is asked to run. Run by path, with a socket.

By path, and with nothing of ours but the standard library and vLLM: a stock engine must not even import this project.
"""

from __future__ import annotations

import array
import builtins
import fcntl
import gc
import json
import logging
import multiprocessing.context
import os
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20
_MOST_FILES = 16
# above all numbers that a program may want its files under
_SPARE = 200


def preload() -> None:
    """What an engine, its core and its worker import."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker
    from vllm import LLM, SamplingParams  # noqa: F401 - they are imported lazily


def answer(connection: socket.socket, imported: dict[str, str]) -> list[str]:
    """Serve until the socket ends; in a forked process, return the program to run."""
    ended: dict[int, int] = {}
    while True:
        data, ancillary, _, _ = connection.recvmsg(
            _MOST_BYTES, socket.CMSG_LEN(_MOST_FILES * array.array("i").itemsize)
        )
        if not data:
            # nothing is to be cleaned up
            os._exit(0)
        request: dict[str, Any] = json.loads(data)
        if "wait" in request:
            connection.send(json.dumps(_status(request["wait"], ended)).encode())
            continue
        files = array.array("i")
        for _, _, content in ancillary:
            files.frombytes(content)
        pid = os.fork()
        if not pid:
            connection.close()
            _become(request, files.tolist(), imported)
            return request["program"]
        for number in files:
            os.close(number)
        connection.send(json.dumps(pid).encode())


def _status(pid: int, ended: dict[int, int]) -> int | None:
    """The exit status of a forked process, negative for a signal; None: it lives."""
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended[pid]


def _become(request: dict[str, Any], files: list[int], imported: dict[str, str]) -> None:
    """The process that was asked for: its session, files, environment and arguments."""
    if request["has_session"]:
        os.setsid()
    os.chdir(request["folder"])
    spare = [fcntl.fcntl(number, fcntl.F_DUPFD, _SPARE) for number in files]
    for number in files:
        os.close(number)
    for number, wanted in zip(spare, request["files"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    environment = request["environment"]
    os.environ.clear()
    os.environ.update({**imported, **environment})
    known = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:0] = [folder for folder in known if folder not in sys.path]
    # the standard library's start methods: a fresh process would import everything again
    contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    level = environment.get("VLLM_LOGGING_LEVEL", "INFO")
    logging.getLogger("vllm").setLevel(level)
    for handler in logging.getLogger("vllm").handlers:
        handler.setLevel(level)


def _run(program: list[str]) -> None:
    """`python [-P] -c CODE ARGUMENTS` or `python [-P] FILE ARGUMENTS`."""
    is_safe, program = program[0] == "-P", program[program[0] == "-P" :]
    is_code = program[0] == "-c"
    code, name = (program[1], "<string>") if is_code else (Path(program[0]).read_text(), program[0])
    if not is_safe:
        sys.path.insert(0, "" if is_code else str(Path(name).parent))
    sys.argv = ["-c", *program[2:]] if is_code else program
    main = types.ModuleType("__main__")
    vars(main).update({"__builtins__": builtins} | ({} if is_code else {"__file__": name}))
    sys.modules["__main__"] = main
    exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":
    before = dict(os.environ)
    preload()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _run(answer(socket.socket(fileno=descriptor), imported))
