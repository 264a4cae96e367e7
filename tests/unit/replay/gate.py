"""Twenty made-up rollouts that a default budget must do well on, as data: docs/adr/0016-goodput.md has the results.

What belongs here: cost lines like those of CPUs and of GPUs, and rollouts on them. Acceptance goes from useless to 0.9,
batches from 4 to 256; `told` below 1 makes a drafter that claims too much.
"""

from bench.replay.synthetic import TracePlan
from vllm_specrollout.budgets.step_cost import CostLine


def _line(fixed: float, node: float, draft: float = 0.0, ask: float = 0.1, **terms: float) -> CostLine:
    """A request's row costs what a node costs."""
    values = {"request": node, "ask_request": 0.005, "prompt_row": node, **terms}
    return CostLine(fixed=fixed, node=node, draft=draft, ask=ask, **values)


CPU = _line(20.0, 0.6, draft=1.0, ask=0.2, ask_request=0.02, branch=0.4, prompt_row=0.5)
CPU_SMALL = _line(5.6, 0.12, draft=0.8, ask=0.14, ask_request=0.04, branch=0.02)
GPU = _line(4.0, 0.012)
GPU_SMALL = _line(2.0, 0.005)
GPU_7B = _line(12.0, 0.02, draft=0.3)
GPU_32B = _line(30.0, 0.05, draft=0.5)
# drafts leave the captured graphs
EAGER = _line(10.0, 0.01, draft=4.0)
# flat up to 256 rows, steep beyond
KNEE = CostLine(fixed=8.0, ask=0.1, ask_request=0.005, rows=(*[0.001] * 14, *[0.05] * 4), prompt_row=0.01)


def _plan(requests: int, batch: int, median: float, share: float, depth: int, **more: object) -> TracePlan:
    """Drafts of that depth, each token of which is right as often as that."""
    return TracePlan(requests=requests, batch=batch, median=median, acceptance=(share,) * depth, **more)  # type: ignore[arg-type]


PLANS = {
    "gpu b48 .55": _plan(192, 48, 50, 0.55, 8, cost=GPU, seed=1),
    "gpu b48 boast": _plan(192, 48, 50, 0.45, 8, told=0.4, cost=GPU, seed=2),
    "gpu-small b256 .5": _plan(512, 256, 80, 0.5, 6, cost=GPU_SMALL, seed=3),
    "gpu-small b128 .3": _plan(256, 128, 80, 0.3, 6, told=0.5, cost=GPU_SMALL, seed=4),
    "gpu-7b b64 .7": _plan(192, 64, 80, 0.7, 8, cost=GPU_7B, seed=5),
    "gpu-7b b16 tree": _plan(64, 16, 80, 0.4, 6, sibling=0.3, cost=GPU_7B, seed=6),
    "gpu-7b b64 drift": _plan(192, 64, 80, 0.8, 8, drift=0.3, silent=0.3, cost=GPU_7B, seed=7),
    "gpu-32b b32 .9": _plan(96, 32, 120, 0.9, 12, cost=GPU_32B, seed=8),
    "gpu-32b b128 .5": _plan(256, 128, 80, 0.5, 8, cost=GPU_32B, seed=9),
    "knee b64 .6": _plan(192, 64, 80, 0.6, 8, cost=KNEE, seed=10),
    "knee b192 .5": _plan(384, 192, 80, 0.5, 8, spread=1.0, cost=KNEE, seed=11),
    "eager b32 .5": _plan(128, 32, 80, 0.5, 8, cost=EAGER, seed=12),
    "eager b8 poor": _plan(32, 8, 80, 0.3, 6, told=0.3, cost=EAGER, seed=13),
    "cpu b8 fading": TracePlan(requests=32, batch=8, median=80, longest=400, seed=14, cost=CPU),
    "cpu b16 tail": TracePlan(
        requests=48, batch=16, median=50, spread=1.2, longest=600, sibling=0.3, seed=15, cost=CPU
    ),
    "cpu b32 boast": _plan(96, 32, 60, 0.4, 6, told=0.5, seed=16, cost=CPU),
    "cpu b64 .6": _plan(192, 64, 60, 0.6, 8, seed=17, cost=CPU),
    "cpu b16 useless": _plan(48, 16, 100, 0.05, 8, told=0.2, seed=18, cost=CPU),
    "cpu-small b8 boast": _plan(48, 8, 60, 0.35, 8, told=0.4, seed=19, cost=CPU_SMALL),
    "cpu-small b4 .9": _plan(24, 4, 120, 0.9, 12, seed=20, cost=CPU_SMALL),
}
