"""The process of a group's worker: begun by `vllm_specrollout.cluster.group.RolloutGroup`, and gone with it."""

from __future__ import annotations

import argparse
import json
import os

from vllm_specrollout.cluster.group.channel import ZmqLine, wait
from vllm_specrollout.cluster.group.member import Member
from vllm_specrollout.worker.ending import Ending

_IDLE_S = 0.2


def main() -> None:
    """As the group begins it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--drafter", default="")
    parser.add_argument("--drafter-model", default="")
    parser.add_argument("--cores", default="")
    parser.add_argument("--engine", type=json.loads, required=True)
    given = parser.parse_args()
    ending = Ending()
    # before torch counts them
    cores = [int(core) for core in given.cores.split(",") if core]
    os.sched_setaffinity(0, cores)
    from vllm_specrollout.worker.rollout.engine import RolloutEngine

    engine = RolloutEngine(given.engine, given.drafter, given.drafter_model)
    lines = [ZmqLine(given.driver, given.name, may_lose=False)]
    if given.coordinator:
        lines.append(ZmqLine(given.coordinator, given.name, may_lose=True))
    member = Member(engine, *lines, devices=tuple(f"cpu:{core}" for core in cores))
    ending.wait_for_turn()
    try:
        while os.getppid() == given.parent and not ending.is_asked:
            if member.is_idle:
                wait(lines, _IDLE_S)
            member.turn()
    finally:
        engine.close()
        for line in lines:
            line.close()


if __name__ == "__main__":
    main()
