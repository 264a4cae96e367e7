"""An example with its engines on the V2 runner, under Triton's interpreter.

    python -m tests.trainers.on_v2 openrlhf/rollout.py

The model is random and small, answers are few and short. Further arguments are the example's own.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

from bench.runner import interpreter
from tests.v2.models import small_model

ROOT = Path(__file__).parents[2]


def main(example: str) -> int:
    """The example's exit status."""
    folder = ROOT.joinpath("examples", example).parent
    paths = [str(folder), str(Path(__file__).with_name("interpreted")), *sys.path]
    sys.path.insert(0, str(folder))
    rollout = importlib.import_module("rollout")
    # interpreted products round as the host's BLAS does, and in bfloat16 a near tie may fall otherwise for that
    rollout.LENGTH, rollout.DTYPE = 24, "float32"
    # for what the trainer starts; this process has no engine
    rollout.ENVIRONMENT.update(interpreter.ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths))
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch), "qwen3", rollout.DTYPE)
        sys.argv[1:] = ["--model", model, "--problems", "4", "--samples", "2", *sys.argv[2:]]
        return int(rollout.main())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
