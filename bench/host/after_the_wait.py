"""Host time between the arrival of a step's tokens and the launch of the next forward pass, on the V2 runner.

All of it is time in which a GPU idles. It is told by the thread's own clock, which a busy host does not stop. Kernels
launched and arrays copied after the wait are counted, not timed: no device is there (without_a_device.py). Run:
`python -m bench.host.after_the_wait`.
"""

from __future__ import annotations

import argparse
import os

from bench.runner import interpreter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32,64", help="requests that run at once")
    parser.add_argument("--steps", type=int, default=200, help="that are timed; those before them warm up")
    parser.add_argument("--drafters", default="history", help="by name, best first")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(interpreter.ENVIRONMENT)
    interpreter.prepare()
    # once the process is set up
    from bench.host.without_a_device import STAGES, leave_out_the_device, measured
    from vllm_specrollout.config import SpecRolloutConfig

    leave_out_the_device()
    spec = SpecRolloutConfig(drafters=tuple(args.drafters.split(",")))
    print(f"milliseconds, medians; after = {' + '.join(STAGES[1:])}; nodes and tokens are per request and step")
    titles = (*STAGES, "after", "p90", "launches", "copies", "nodes", "tokens")
    print("batch" + "".join(f"{title:>9}" for title in titles) + "  steps")
    for batch in map(int, args.batches.split(",")):
        print(measured(batch, spec, args.steps), flush=True)


if __name__ == "__main__":
    main()
