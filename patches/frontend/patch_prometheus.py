"""vLLM's spec-decode counters in /metrics."""

from vllm_specrollout.patches import Patch, features
from vllm_specrollout.server.metrics import count_drafts

PATCHES = (
    Patch(
        target="vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
        wrap=count_drafts,
        why="the stock counters exist only with a `speculative_config`, which our engine does not have",
        upstream="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/metrics/loggers.py",
        versions=features.ALL,
        remove_when="vLLM makes the counters when the scheduler reports drafts",
        process="frontend",
    ),
)
