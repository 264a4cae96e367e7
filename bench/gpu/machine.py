"""The device as `nvidia-smi` tells it: a process that asked the device itself would hold memory on it."""

from __future__ import annotations

import subprocess
from typing import Any


def describe() -> dict[str, Any]:
    """Name, driver and memory of the first GPU; `gpu` is None without one."""
    values = _query("name,driver_version,memory.total,memory.used")
    if not values:
        return {"gpu": None}
    name, driver, *memory = values[0]
    total, used = (int(text) if text.isdigit() else None for text in memory)
    return {"gpu": name, "driver": driver, "gpu_memory_mib": total, "gpu_memory_used_mib": used}


def _query(fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-gpu`; none without an NVIDIA driver."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [row for row in rows if len(row) == fields.count(",") + 1]
