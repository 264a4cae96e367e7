"""The trace of an RL loop: one file per rollout, one JSON object per line and answer, compressed.

The files are `rollout-00000.jsonl.zst`, counted by step. Each line is one answer of the stock engine (ours gave the
same one, or the run says so) and stands alone; docs/guides/rl-loop.md lists its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import zstandard

SCHEMA = 1


def write_rollout(folder: Path, step: int, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write one rollout's answers; a file of the same step is replaced."""
    text = "".join(json.dumps({"schema": SCHEMA, **line}, separators=(",", ":")) + "\n" for line in lines)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rollout-{step:05d}.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=9).compress(text.encode()))
    return path


def read_rollouts(folder: Path) -> Iterator[dict[str, Any]]:
    """All answers of a trace in the order of steps."""
    for path in sorted(folder.glob("rollout-*.jsonl.zst")):
        text = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        yield from map(json.loads, text.decode().splitlines())
