"""`specrollout bench graphs`: device memory of engines that differ in their CUDA graphs alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_specrollout.cli.plan import read_shape
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.scheduling.cudagraphs import CAPTURE_SIZES, GraphPlan, estimate_mib, plan_graphs

from ..gpu.machine import describe
from ..runner.models import BARE, bare_model
from ..runner.report import Found, Table
from ..runner.scenario import EngineScenario, Session, command, flag

ARMS: dict[str, tuple[int, ...] | None] = {
    "stock": None,
    "no graphs for drafts": (),
    "one draft size": (3,),
    "four draft sizes": (3, 6, 12, 24),
}
"""Engine -> draft sizes that it captures graphs for, the configured most and its halves down to 3."""
_MAX_NUM_SEQS, _MAX_GRAPHS = 256, 64
"""Most requests at once, and most graphs for drafts: the defaults."""
_LOGGED = re.compile(r"Graph capturing finished in \S+ secs, took (-?[\d.]+) GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One engine, in MiB."""

    name: str
    device_mib: float
    # by vLLM's log, which covers vLLM's own graphs only; None: it says nothing
    logged_mib: float | None
    # by `specrollout plan`
    estimated_mib: float | None


@dataclass(frozen=True, kw_only=True)
class Graphs(EngineScenario):
    """Measure the device memory of engines that differ in nothing but their CUDA graphs."""

    bench: ClassVar[str] = "graphs"

    model: str = flag("7B", "Qwen2.5's shape of this size.", choices=tuple(BARE))

    def measure(self, session: Session) -> Found:
        if describe()["gpu"] is None:
            raise UnsupportedError("no NVIDIA GPU can be seen: nvidia-smi names none", "run this beside one")
        folder, report = bare_model(self.model, session.scratch / "model"), session.display.steps(len(ARMS))
        more = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
        # as large in all, so that graphs are what differs
        more["kv_cache_memory_bytes"] = 2 << 30
        rows, shape = [], {"seqs": _MAX_NUM_SEQS, "length": 4096, "width": 8, "is_eager": False}
        environment = {"VLLM_LOGGING_LEVEL": "INFO"}
        with self.make_engines(folder, report, **shape, environment=environment) as engines:
            for name, sizes in ARMS.items():
                before = describe()["gpu_memory_used_mib"]
                engine = engines.start(name, spec_rollout(sizes), **more)
                logged = [float(gib) * 1024 for gib in _LOGGED.findall(engine.log())]
                used, estimated = describe()["gpu_memory_used_mib"] - before, None
                if sizes:
                    # chains may be as long as trees are large, so both sets are alike
                    one_set = plan_graphs(sizes, CAPTURE_SIZES, _MAX_NUM_SEQS, limit=_MAX_GRAPHS // 2)
                    estimated = estimate_mib(GraphPlan(2 * one_set.target), read_shape(folder))
                last = logged[-1] if logged else None
                rows.append(GraphRow(name=name, device_mib=used, logged_mib=last, estimated_mib=estimated))
                engines.stop(name)
        return Found(model=f"random weights, {self.model}", rows=rows)

    def title(self, found: Found) -> str:
        return f"{found.model}, {self.dtype}: MiB of the device"

    def told(self, found: Found) -> Iterable[Table]:
        return [Table(found.rows, _COLUMNS)]


_COLUMNS = {"engine": "name", "device": "device_mib", "logged": "logged_mib", "estimated": "estimated_mib"}


def spec_rollout(sizes: tuple[int, ...] | None) -> dict[str, Any] | None:
    """Our configuration of an engine that captures these draft sizes; None: stock vLLM."""
    if sizes is None:
        return None
    most = max(sizes, default=24)
    config: dict[str, Any] = {"drafters": ["ngram"], "max_draft_tokens": most, "max_depth": most}
    return config if sizes else {**config, "max_graphs": 0}


bench_graphs = command(Graphs)
