"""`specrollout doctor --gpu`: an engine checks itself on the device, and one screen says what it found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server.device_check import MARK

TIMEOUT_S = 600
_CHILD = ("-m", "vllm_specrollout.server.device_check")
_TAIL = 12
"""Lines of a process that died, which are shown."""
_WORDS = {"tree": "trees", "chain": "chains only", "off": "no drafts"}


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What the process said, or its last lines where it said nothing."""

    found: dict[str, Any] | None
    status: int
    last_lines: tuple[str, ...]

    @property
    def is_healthy(self) -> bool:
        return self.found is not None and self.found["state"] == "passed"

    def as_json(self) -> str:
        told = self.found or {"state": "died", "status": self.status, "last_lines": self.last_lines}
        return msgspec.json.format(msgspec.json.encode(told), indent=2).decode()

    def as_text(self) -> str:
        """One screen, to be pasted into an issue's thread as it is."""
        if self.found is None:
            lines = [f"spec rollout on this device: the check died (exit status {self.status})", "", *self.last_lines]
            way = '`{"self_check": "off", "shape": "chain"}` drafts without the check'
            lines += ["", f"hint: please report these lines; {way}"]
            return "\n".join(lines)
        found = self.found
        verdict = "all parts passed" if self.is_healthy else f"{len(found['failed'])} part(s) failed"
        drafted = _WORDS[found["shape"]] + (f" ({found['shape_reason']})" if found["shape_reason"] else "")
        rows = [
            ("device", found["device"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
            ("model", f"{found['model']}, {found['dtype']}"),
            *((part, "passed") for part in found["passed"]),
            *((part, f"FAILED: {what}") for part, what in found["failed"].items()),
            ("drafted", drafted),
            ("time", f"{found['seconds']:.1f} s"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"spec rollout on this device: {verdict}", ""]
        lines += [f"  {name:<{width}}  {value}" for name, value in rows]
        if not self.is_healthy:
            lines += ["", "hint: drafts stay exact, for what failed is not used; please report these lines"]
        return "\n".join(lines)


def check_device(model: str, command: tuple[str, ...] = _CHILD, timeout_s: float = TIMEOUT_S) -> DeviceReport:
    """Have a process of its own check the device.

    Args:
        model: a folder or a name; "": a small random one.

    Raises:
        ConfigError: it cannot be checked.
    """
    try:
        done = subprocess.run(
            [sys.executable, *command, model], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the device's check did not end within {timeout_s:.0f} s",
            "give a smaller `--model`, or none; a GPU that hangs is freed by ending its process",
        ) from None
    found = [line[len(MARK) :] for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        lines = (done.stdout + done.stderr).strip().splitlines()[-_TAIL:]
        return DeviceReport(None, done.returncode, tuple(lines))
    told = msgspec.json.decode(found[-1])
    if "cause" in told:
        raise ConfigError(told["cause"], told["hint"])
    return DeviceReport(told, done.returncode, ())
