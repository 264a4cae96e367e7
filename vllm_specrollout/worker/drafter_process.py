"""The process in which a model drafts: begun by an engine, or by hand as `specrollout drafter`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm_specrollout.cluster.mail import MailServer
from vllm_specrollout.cluster.serving import Serving
from vllm_specrollout.config import envs
from vllm_specrollout.worker.ending import Ending, end_with


def main() -> None:
    """As an engine begins it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("address")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--cores", default="")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--asleep", action="store_true")
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
            takes_up=not given.stock,
            is_asleep=given.asleep,
        )


def serve(
    model: str,
    address: str,
    engine_args: dict[str, Any],
    *,
    cores: Sequence[int] = (),
    parent: int | None = None,
    takes_up: bool = True,
    key_file: str = "",
    ready: Callable[[str], None] = lambda address: None,
    is_asleep: bool = False,
) -> None:
    """Draft with a model for all engines that post at an address, until this process is told to end.

    Args:
        cores: CPU cores to run on; empty: as vLLM chooses.
        parent: the process which began this one: where it is gone this one ends.
        takes_up: as of `DrafterEngine`.
        key_file: of an address of tcp: made where it is not there.
        ready: told the address, once this process drafts.
        is_asleep: until it is told otherwise, it has given its memory back.

    Raises:
        ConfigError, MailError: the address cannot be used.
    """
    # not those of the process that began this one, which vLLM has bound to its own
    os.sched_setaffinity(0, cores or range(os.cpu_count() or 1))
    ending = Ending()
    office = MailServer(address, key_file=key_file)
    try:
        # imported late: an address that cannot be used is said at once
        from vllm_specrollout.worker.drafter_engine import DrafterEngine

        engine = DrafterEngine(model, engine_args, takes_up=takes_up)
        try:
            serving = Serving(
                engine, office, lambda: ending.is_asked or (parent is not None and os.getppid() != parent)
            )
            serving.rest(is_asleep)
            ready(office.address)
            ending.wait_for_turn()
            serving.run()
        finally:
            engine.shutdown()
    finally:
        office.close()


if __name__ == "__main__":
    main()
