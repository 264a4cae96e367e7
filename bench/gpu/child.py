"""The child's side of a part: rows are measured in a process that ends with them. `walk.py` starts it.

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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any


class NotMeasured(Exception):
    """This row cannot be had, and the others still can."""


class Rows(AbstractContextManager["Rows"]):
    """What measures the rows of a part: a context manager with a method for each kind of row.

    A method takes the row's parameters and returns its values, of JSON types; `is_right` among them where there was
    something to check. What it raises ends the process, unless it is `NotMeasured`.

    Args:
        setup: the part's.
        rows: parameters of the rows that it will be asked for.
    """

    def __init__(self, setup: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self.setup = setup

    def __exit__(self, *_: object) -> None:
        """What is held goes with the process."""

    def measure(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return getattr(self, params["kind"])(params)


def serve(connection: Connection) -> None:
    part = connection.recv()
    try:
        module, _, name = part["runner"].partition(":")
        runner: Rows = getattr(importlib.import_module(module), name)(part["setup"], part["rows"])
    except Exception as error:
        connection.send(_failure(error))
        return
    connection.send({"values": None})
    with runner:
        while (params := connection.recv()) is not None:
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


def main() -> None:
    # where it hangs, if somebody asks
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
