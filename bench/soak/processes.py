"""What the processes of a server hold: memory and handles, read from /proc."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FRONT_END, DRAFTER = "front end", "drafter"
_TITLE = re.compile(r"VLLM::(EngineCore|Worker)")
_ROLES = {"EngineCore": "engine core", "Worker": "worker"}
_DRAFTER = "vllm_specrollout.worker.streams.process"
_TRACKER = "resource_tracker"
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Of all processes of one role together."""

    processes: int
    rss_mib: float
    # open files, pipes and the like
    files: int
    # open sockets; a front end has one for each client
    sockets: int


def holdings(root: int) -> dict[str, Holding]:
    """Role -> what its processes hold: of a server by its process id, and of all that it started."""
    found: dict[str, Holding] = {}
    for pid in family(root):
        with contextlib.suppress(OSError):
            role = role_of(pid, root)
            rss_mib = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB
            files, sockets = _handles(pid)
            before = found.get(role, Holding(processes=0, rss_mib=0.0, files=0, sockets=0))
            found[role] = Holding(
                processes=before.processes + 1,
                rss_mib=before.rss_mib + rss_mib,
                files=before.files + files,
                sockets=before.sockets + sockets,
            )
    return found


def family(root: int) -> list[int]:
    """A process and all that descend from it, those in sessions of their own as well."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)

    def below(pid: int) -> Iterator[int]:
        yield pid
        for child in children.get(pid, ()):
            yield from below(child)

    return list(below(root))


def role_of(pid: int, root: int) -> str:
    """What a process is for; raises OSError once it is gone."""
    if pid == root:
        return FRONT_END
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if (title := _TITLE.search(line)) is not None:
        return _ROLES[title[1]]
    if _DRAFTER in line:
        return DRAFTER
    return "resource tracker" if _TRACKER in line else "others"


def _handles(pid: int) -> tuple[int, int]:
    """(files and the like, sockets) that a process has open."""
    files = sockets = 0
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            is_socket = os.readlink(handle).startswith("socket:")
            sockets += is_socket
            files += not is_socket
    return files, sockets


def disk_bytes(folder: Path) -> int:
    """Of all files in a folder; 0 where there is none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total
