"""The process in which a model drafts: begun by an engine, or by hand as `specrollout drafter`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specrollout.cluster.address import open_mailbox
from vllm_specrollout.cluster.loop import Loop
from vllm_specrollout.config import envs
from vllm_specrollout.worker.ending import Ending, end_with

MOST_NODES = 16
"""Nodes of a stream that are looked behind, unless something else is asked for."""


def main() -> None:
    """As an engine begins it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("address")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--cores", default="")
    parser.add_argument("--most-nodes", type=int, default=MOST_NODES)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--ready", default="")
    given = parser.parse_args()
    # in a group it ends with its engine, even while it loads
    if given.bound or envs.ends_with_parent():
        end_with(given.parent)
    cores = [int(core) for core in given.cores.split(",") if core]
    with contextlib.suppress(KeyboardInterrupt):
        serve(
            given.model,
            given.address,
            given.engine_args,
            cores=cores,
            parent=given.parent,
            most_nodes=given.most_nodes,
            stays=given.stay,
            ready=given.ready,
        )


def serve(
    model: str,
    address: str,
    engine_args: dict[str, Any],
    *,
    cores: Sequence[int] = (),
    keys: str | None = None,
    parent: int | None = None,
    most_nodes: int = MOST_NODES,
    stays: bool = False,
    ready: str = "",
) -> None:
    """Draft with a model for the verifier at the other end of an address, until it says goodbye.

    Args:
        cores: CPU cores to run on; empty: all.
        most_nodes: of a stream that are looked behind, at most.
        parent: the process which began this one: where it is gone this one ends. Unless this one stays, that is the
            verifier's, and serves the mailbox.
        stays: for one verifier after another: this process serves the mailbox, and ends when it is told to.
        ready: file in which its process id is left once it can draft; empty: none.

    Raises:
        ConfigError, MailboxError: the address cannot be used.
    """
    # not those of the process that began this one, which vLLM has bound to its own
    os.sched_setaffinity(0, cores or range(os.cpu_count() or 1))
    ending = Ending()
    mailbox = open_mailbox(address, serve=parent is None or stays, keys=keys)
    try:
        # imported late: an address that cannot be used is said at once
        from vllm_specrollout.worker.streams.engine import StreamEngine

        engine = StreamEngine(model, most_nodes, engine_args)
        try:
            if ready:
                Path(ready).write_text(str(os.getpid()), encoding="ascii")
            ending.wait_for_turn()
            Loop(
                engine,
                mailbox,
                lambda: ending.is_asked or (parent is not None and os.getppid() != parent),
                stays=stays,
            ).run()
        finally:
            engine.shutdown()
    finally:
        mailbox.close()


if __name__ == "__main__":
    main()
