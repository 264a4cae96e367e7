"""The device as `nvidia-smi` tells it: a process that asked the device itself would hold memory on it."""

from __future__ import annotations

import subprocess
import time
from typing import Any

_SLACK_MIB, _FREE_S = 1 << 10, 20.0
"""Memory that does not matter, and how long a killed process may take to give its own back."""


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
