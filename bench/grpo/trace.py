"""The trace of an RL loop: one file per rollout, one JSON object per line and answer, compressed.

The files are `rollout-00000.jsonl.gz`, counted by step; `.jsonl.zst` where the `zstandard` package is installed. Each
line is one answer of the stock engine (ours gave the same one, or the run says so) and stands alone:

    schema            1; changes when a field changes its meaning or goes away, new fields leave it
    step, epoch       of the loop, from 0
    weights_version   updates that the policy had seen when it answered, from 0
    problem_id        samples of one problem share it, in all epochs
    family, sample    of the problem; number of the answer in its group, from 0
    request_id        as the engines were told it; no two lines of a run share one
    seed              of the sampling, with temperature 1
    prompt_token_ids  list of int
    token_ids         list of int, the end token included if the answer ended by itself
    num_tokens        length of token_ids
    finish            "stop", or "length" if the answer was cut off
    finish_s          seconds from the rollout's begin to this answer's end, in the stock engine
    reward            float
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1


def write_rollout(folder: Path, step: int, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write one rollout's answers; a file of the same step is replaced."""
    text = "".join(json.dumps({"schema": SCHEMA, **line}, separators=(",", ":")) + "\n" for line in lines)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"rollout-{step:05d}.jsonl"
    if importlib.util.find_spec("zstandard") is not None:
        import zstandard

        path, data = Path(f"{stem}.zst"), zstandard.ZstdCompressor(level=9).compress(text.encode())
    else:
        # no time stamp: equal rollouts give equal files
        path, data = Path(f"{stem}.gz"), gzip.compress(text.encode(), mtime=0)
    path.write_bytes(data)
    return path


def read_rollouts(folder: Path) -> Iterator[dict[str, Any]]:
    """All answers of a trace in the order of steps, the format of each file by its ending."""
    for path in sorted(folder.glob("rollout-*.jsonl.*")):
        data = path.read_bytes()
        if path.suffix == ".zst":
            import zstandard

            data = zstandard.ZstdDecompressor().decompress(data)
        else:
            data = gzip.decompress(data)
        yield from map(json.loads, data.decode().splitlines())
