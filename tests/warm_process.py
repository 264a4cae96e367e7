"""Imports vLLM once, then forks a process for every Python program that it is asked to run. Run by path, with a socket.

By path, and with nothing of ours but the standard library and vLLM: a stock engine must not even import this project.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import importlib
import json
import logging
import multiprocessing.context
import os
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20
_MOST_FILES = 16
# above all numbers that a program may want its files under
_SPARE = 512


def preload() -> None:
    """What an engine, its core and its worker import."""
    for name in ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
    # it finds the title's place beside the environment that this process began with, and remembers it
    importlib.import_module("setproctitle").getproctitle()


def answer(connection: socket.socket, imported: dict[str, str]) -> list[str]:
    """Serve until the socket ends; in a forked process, return the program to run."""
    ended: dict[int, int] = {}
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not data:
            # nothing is to be cleaned up
            os._exit(0)
        request: dict[str, Any] = json.loads(data)
        if "wait" in request:
            connection.send(json.dumps(_status(request["wait"], ended)).encode())
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            _become(request, files, imported)
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
    os.register_at_fork(after_in_child=_count_beside_others)
    level = environment.get("VLLM_LOGGING_LEVEL", "INFO")
    logging.getLogger("vllm").setLevel(level)
    for handler in logging.getLogger("vllm").handlers:
        handler.setLevel(level)


def _count_beside_others() -> None:
    """Prometheus' client decides when it is imported whether processes count together: it was, before they began."""
    values: Any = sys.modules.get("prometheus_client.values")
    if values is not None:
        values.ValueClass = values.get_value_class()


def _run(program: list[str]) -> int:
    """`python [-P] -c CODE ARGUMENTS` or `python [-P] FILE ARGUMENTS`; its exit status."""
    is_safe, program = program[0] == "-P", program[program[0] == "-P" :]
    is_code = program[0] == "-c"
    code, name = (program[1], "<string>") if is_code else (Path(program[0]).read_text(), program[0])
    if not is_safe:
        sys.path.insert(0, "" if is_code else str(Path(name).parent))
    sys.argv = ["-c", *program[2:]] if is_code else program
    main = types.ModuleType("__main__")
    vars(main).update({"__builtins__": builtins} | ({} if is_code else {"__file__": name}))
    sys.modules["__main__"] = main
    try:
        exec(compile(code, name, "exec"), vars(main))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """As the interpreter ends, but that it takes nothing apart: what was imported is most of this process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    before = dict(os.environ)
    preload()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _end(_run(answer(socket.socket(fileno=descriptor), imported)))
