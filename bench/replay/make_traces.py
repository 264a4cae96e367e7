"""Makes the three traces in tests/traces. Times differ between hosts, so files do too; answers and proposals do not."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_specrollout.replay.files import read_trace, write_trace

from .rollouts import Rollout, run, start, warm_up, without_first

BUDGET = "fixed"
_BOTH = ("history", "ngram")
TRACES = {
    # nothing is known of any problem yet: siblings and the answer itself draft
    "early_epoch": Rollout(prompts=12, samples=4, batch=8, seed=11, noise=(1,), drafters=_BOTH),
    # the third pass over the same problems, with other noise
    "late_epoch": Rollout(prompts=12, samples=4, batch=8, seed=11, noise=(1, 2, 3), drafters=_BOTH),
    # many short answers and four very long ones: most of the time the batch is nearly empty
    "long_tail": Rollout(prompts=18, samples=2, batch=16, seed=12, noise=(1,), drafters=_BOTH, long=2),
}


def make(folder: Path, names: Iterable[str], tell: Callable[[str], None]) -> None:
    """Record the named ones of TRACES into `folder`."""
    for name in names:
        rollout = TRACES[name]
        path = folder / f"{name}.jsonl.zst"
        with tempfile.TemporaryDirectory() as history:
            for noise in rollout.noise:
                record = path if noise == rollout.noise[-1] else None
                # an engine for each pass: what it leaves on disk is what the next one knows
                with start(rollout, BUDGET, Path(history), record) as engine:
                    engine.ask("begin_epoch")
                    count = warm_up(engine, rollout)
                    run(engine, rollout, noise)
        trace = without_first(read_trace(path), count)
        header = dataclasses.replace(trace.header, model="bench/policy/checkpoint")
        write_trace(path, dataclasses.replace(trace, header=header))
        tell(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
