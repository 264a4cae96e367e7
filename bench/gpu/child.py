"""The child's side of a part: rows are measured in a process that ends with them. `children.py` starts it.

What the parent sends: the part, then one row's parameters after another, then None. Each is answered: by what was
measured, or by what went wrong. The latter ends this process, since a device that was used wrongly once is of no more
use; unless it is `NotMeasured`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .runner import NotMeasured, Runner


def serve(connection: Connection) -> None:
    part = connection.recv()
    try:
        module, _, name = part["runner"].partition(":")
        runner: Runner = getattr(importlib.import_module(module), name)(part["setup"], part["rows"])
    except Exception as error:
        connection.send(_failure(error))
        return
    connection.send({"values": None})
    with runner:
        while (params := connection.recv()) is not None:
            answer: dict[str, Any]
            try:
                # here, where it is the row's mistake
                answer = {"values": json.loads(json.dumps(runner.measure(params)))}
            except NotMeasured as error:
                answer = {**_failure(error), "is_lost": False}
            except Exception as error:
                connection.send(_failure(error))
                return
            connection.send(answer)


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


if __name__ == "__main__":
    # where it hangs, if somebody asks
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
