from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.patches import features, supported
from vllm_specrollout.server import engines, limits, settings

HERE = Path(__file__).parent
WORKER, SCHEDULER = "ours.Worker", "ours.Scheduler"
V1 = engines.Engine("V1", WORKER, SCHEDULER)
V2 = engines.Engine("V2", WORKER, SCHEDULER, "ours.AsyncScheduler")
NONE = (
    "kv_transfer_config",
    "kv_offloading_size",
    "block_size",
    "watermark_config",
    "diffusion_config",
    "scheduler_cls",
)
FALSE = (
    "enable_dbo",
    "kv_sharing_fast_prefill",
    "enable_return_routed_experts",
    "return_sampling_mask",
    "use_fp64_gumbel",
)
ONE = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
STOCK_ARGS = {
    **{**dict.fromkeys(NONE), **dict.fromkeys(FALSE, False), **dict.fromkeys(ONE, 1)},
    **{"ubatch_size": 0, "worker_cls": "auto"},
}
REFUSED_ARGS = {
    "pipeline parallel": dict(pipeline_parallel_size=2),
    "prefill context parallel": dict(prefill_context_parallel_size=2),
    "decode context parallel": dict(decode_context_parallel_size=4),
    "dual-batch overlap": dict(enable_dbo=True),
    "micro-batches": dict(ubatch_size=2),
    "a KV connector that was not tried": dict(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector")),
    "a KV connector that stores drafts": dict(kv_transfer_config={"kv_connector": "OffloadingConnector"}),
    "a KV connector of the user's": dict(
        kv_transfer_config={"kv_connector": "ExampleConnector", "kv_connector_module_path": "mine"}
    ),
    "KV offloading": dict(kv_offloading_size=4.0),
    "KV sharing fast prefill": dict(kv_sharing_fast_prefill=True),
    "a block size branches cannot use": dict(block_size=16),
    "routed experts on V1": dict(enable_return_routed_experts=True),
    "routed experts on V1, by their other option": dict(
        aux_output_config=SimpleNamespace(enable_return_routed_experts=True)
    ),
    "sampling masks on V1": dict(return_sampling_mask=True),
    "fp64 gumbel noise": dict(use_fp64_gumbel=True),
    "watermarking": dict(watermark_config={"x": 1}),
    "diffusion": dict(diffusion_config={"x": 1}),
    "a worker of the user's": dict(worker_cls="mine.Worker"),
    "a pickled worker": dict(worker_cls=b"\x80"),
    "a scheduler of the user's": dict(scheduler_cls="mine.Scheduler"),
    "a scheduler class of the user's": dict(scheduler_cls=Path),
}
STOCK_CONFIG = dict(
    model_config=SimpleNamespace(runner_type="generate", is_diffusion=False),
    speculative_config=None,
    kv_transfer_config=None,
)
REFUSED_CONFIGS = {
    "a pooling model": dict(model_config=SimpleNamespace(runner_type="pooling", is_diffusion=False)),
    "a diffusion model": dict(model_config=SimpleNamespace(runner_type="generate", is_diffusion=True)),
    "a speculators checkpoint": dict(speculative_config=object()),
    "a connector found late": dict(kv_transfer_config=SimpleNamespace(kv_connector="LMCacheConnectorV1")),
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("VLLM_SPEC_ROLLOUT", "VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


def check(config=None, engine=V1, **changes):
    limits.check_engine_args(SimpleNamespace(**{**STOCK_ARGS, **changes}), config or SpecRolloutConfig(), engine)


def on_version(version, **changes):
    limits.check_version(SimpleNamespace(**{**STOCK_ARGS, **changes}), features.TABLE[version], version)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(block_size=64),
        dict(engine=V2, async_scheduling=True, block_size=16),
        dict(async_scheduling=False),
        dict(async_scheduling=True),
        dict(data_parallel_size=4),
        dict(worker_cls=WORKER, scheduler_cls=SCHEDULER),
        dict(per_request_spec_decode_metrics="detailed"),
        dict(kv_transfer_config={"kv_connector": "ExampleConnector"}),
        dict(kv_transfer_config=SimpleNamespace(kv_connector=None)),
    ],
    ids=str,
)
def test_stock_arguments_and_what_does_no_harm_are_accepted(changes):
    check(**changes)
    limits.check_vllm_config(SimpleNamespace(**STOCK_CONFIG))


def test_every_refusal_reads_as_recorded(recorded, render_refusals, monkeypatch):
    config = SimpleNamespace
    cases = {
        **{f"arguments: {k}": lambda v=v: check(**v) for k, v in REFUSED_ARGS.items()},
        "arguments: a drafter that is nowhere": lambda: check(SpecRolloutConfig(drafters=("no.such:Drafter",))),
        "arguments: a budget that is none": lambda: check(SpecRolloutConfig(budget="pathlib:Path")),
        "arguments: no drafter, and no model that drafts": lambda: check(SpecRolloutConfig(drafters=())),
        **{
            f"configuration: {k}": lambda v=v: limits.check_vllm_config(config(**{**STOCK_CONFIG, **v}))
            for k, v in REFUSED_CONFIGS.items()
        },
        "additional_config that is no dict": lambda: settings.additional(config(additional_config=Path())),
        "vLLM missing": lambda: _raise(None),
        "vLLM too old": lambda: _raise("0.31.2"),
    }
    text = render_refusals(cases, hide={"PosixPath": "Path"})
    text += "\n" + render_refusals(
        {
            "V2: batch-sharded sampling": lambda: check(engine=V2, enable_batch_sharded_sampling=True),
            "routed experts on vLLM 0.29": lambda: on_version("0.29.0", enable_return_routed_experts=True),
            "sampling masks on vLLM 0.31": lambda: on_version("0.31.0", return_sampling_mask=True),
            "V2: no such platform": lambda: choose(is_cpu=False, platform="TPU v5"),
            "V2: another runner than vLLM chose": lambda: engines.check_runner(engines.GPU_V2, uses_v2=False),
            "V1: another runner than vLLM chose": lambda: engines.check_runner(engines.CPU_V1, uses_v2=True),
        }
    )
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    text += "\n" + render_refusals({"environment: the V2 runner on CPU": choose})
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "{oops")
    unread = SimpleNamespace(additional_config={})
    text += "\n" + render_refusals({"environment: unreadable": lambda: settings.requested(unread)})
    assert text == recorded(HERE / "refusals" / "limits.txt", text)


def _raise(version):
    raise supported.version_problem(version)


def choose(is_cpu=True, is_cuda=False, platform=""):
    return engines.choose(is_cpu=is_cpu, is_cuda=is_cuda, platform=platform)


def test_the_engine_follows_platform_and_model_runner_but_on_cuda_there_is_v2_alone(monkeypatch):
    assert choose() is engines.CPU_V1
    assert choose(is_cpu=False, is_cuda=True) is engines.GPU_V2
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert choose(is_cpu=False, is_cuda=True) is engines.GPU_V2
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose() is engines.CPU_V2
    assert engines.CPU_V2.scheduler_for(is_async=True) != engines.CPU_V2.scheduler_for(is_async=False)
    assert engines.CPU_V1.scheduler_for(is_async=True) == engines.CPU_V1.scheduler


def test_a_keyword_outranks_additional_config_and_both_outrank_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", '{"max_depth": 1}')
    args = SimpleNamespace(additional_config={})
    assert settings.requested(args)[0].max_depth == 1
    given = args.additional_config = {"spec_rollout": {"max_depth": 2}, "other": 5}
    assert settings.requested(args)[0].max_depth == 2
    settings.fold(args, {"max_depth": 3}, "spec_rollout")
    assert settings.requested(args)[0].max_depth == 3
    assert args.additional_config["other"] == 5
    assert given == {"spec_rollout": {"max_depth": 2}, "other": 5}, "the user's own dict is left alone"


def test_an_engine_without_our_entry_is_off_also_where_the_environment_says_so(monkeypatch):
    for value in ("0", "off", ""):
        monkeypatch.setenv("VLLM_SPEC_ROLLOUT", value)
        assert settings.requested(SimpleNamespace(additional_config={}))[0] is None
    assert not settings.is_on(SimpleNamespace(additional_config={}))
    assert settings.config_of(SimpleNamespace(additional_config={"spec_rollout": False})) is None
