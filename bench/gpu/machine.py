"""The device as `nvidia-smi` tells it, and processes that an earlier start left behind.

This process must not touch the device itself: a context holds memory, and an error in one outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

MARK = "SPECROLLOUT_FIRST_HOUR"
"""Variable of every process that a start has begun, whatever its group: the folder that it works in."""
_SLACK_MIB, _FREE_S = 1 << 10, 20.0
"""Memory that does not matter, and how long a killed process may take to give its own back."""


def marked(environment: Mapping[str, str], work: Path) -> dict[str, str]:
    """The environment of a child, in which it and all below it can be told from others."""
    # vLLM names its processes, which would otherwise overwrite what is read here
    return {**environment, MARK: str(work), "SPT_NOENV": "1"}


def marked_like(environment: Mapping[str, str]) -> list[int]:
    """All processes with this environment's mark, but this one and those above it."""
    if MARK not in environment:
        return []
    this = psutil.Process()
    above = {this.pid, *(one.pid for one in this.parents())}
    others = [one for one in psutil.process_iter(["environ"]) if one.pid not in above]
    return sorted(one.pid for one in others if (one.info["environ"] or {}).get(MARK) == environment[MARK])


def end_orphans(work: Path) -> list[int]:
    """End the processes of earlier starts that worked in the same folder; which were ended."""
    found = marked_like({MARK: str(work)})
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return found


def ask_where(pids: Iterable[int]) -> None:
    """Have those that can write down all their stacks; the signal would end the others."""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
            if caught >> (signal.SIGUSR2 - 1) & 1:
                os.kill(pid, signal.SIGUSR2)


def describe() -> dict[str, Any]:
    """Name, driver and memory of the first GPU; `gpu` is None without one."""
    values = _query("gpu", "name,driver_version,memory.total,memory.used")
    if not values:
        return {"gpu": None}
    name, driver, *memory = values[0]
    total, used = (int(text) if text.isdigit() else None for text in memory)
    return {"gpu": name, "driver": driver, "gpu_memory_mib": total, "gpu_memory_used_mib": used}


def strangers() -> list[str]:
    """What else computes on the device, in words."""
    rows = _query("compute-apps", "pid,process_name,used_memory")
    return [f"process {pid} ({name}) holds {used} MiB of the GPU" for pid, name, used in rows]


def wait_until_free(before_mib: int | None) -> str | None:
    """Wait until no more of the device's memory is held than before; what is wrong if it is."""
    end = time.monotonic() + _FREE_S
    while True:
        used = describe().get("gpu_memory_used_mib")
        if used is None or used < (before_mib or 0) + _SLACK_MIB:
            return None
        if time.monotonic() > end:
            by = "; ".join(strangers()) or "by whom, nvidia-smi does not say"
            return f"{used} MiB of the GPU are still held: {by}"
        time.sleep(0.5)


def _query(what: str, fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-WHAT`; none without an NVIDIA driver."""
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [row for row in rows if len(row) == fields.count(",") + 1]
