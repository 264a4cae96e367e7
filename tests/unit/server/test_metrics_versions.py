"""Series of old weights are dropped: a run has thousands of versions."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_specrollout.observe.metrics import MARK
from vllm_specrollout.server.metrics import NEWEST_VERSIONS, Counts


def made_in(registry, kind):
    return lambda multiprocess_mode=None, **arguments: kind(registry=registry, **arguments)


def test_only_the_newest_versions_are_shown():
    registry = CollectorRegistry()
    kinds = {"_counter_cls": Counter, "_gauge_cls": Gauge, "_histogram_cls": Histogram}
    logger = SimpleNamespace(
        per_engine_labelvalues={0: ["m", "0"]}, **{name: made_in(registry, kind) for name, kind in kinds.items()}
    )
    counts = Counts(logger)
    for version in range(50):
        for source in ("history", "model"):
            counts.record({f"{MARK}version_verified_nodes/{source}/{version}": 2}, 0)
    shown = {
        (sample.labels["source"], int(sample.labels["weights_version"])): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:spec_rollout_version_verified_nodes_total"
    }
    newest = range(50 - NEWEST_VERSIONS, 50)
    assert shown == {(source, version): 2.0 for source in ("history", "model") for version in newest}
