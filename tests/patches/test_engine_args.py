import argparse
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from vllm_specrollout import patches
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.server import engine_args
from vllm_specrollout.server.engines import CPU_V1
from vllm_specrollout.server.settings import Hashed


def engine_of(vllm_config):
    return (
        vllm_config.parallel_config.worker_cls,
        vllm_config.scheduler_config.scheduler_cls,
        vllm_config.cache_config.block_size,
        vllm_config.additional_config,
    )


STOCK = ("vllm.v1.worker.cpu_worker.CPUWorker", None, 128, {})
OURS = (CPU_V1.worker, CPU_V1.scheduler, 32, {"spec_rollout": SpecRolloutConfig(max_draft_tokens=8).as_dict()})


def arguments(model, *flags):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser)
    return parser.parse_args(["--model", model, "--skip-tokenizer-init", *flags])


def parsed(model, *flags):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs.from_cli_args(arguments(model, *flags))


def test_keyword_flag_additional_config_and_environment_mean_the_same(make, model, monkeypatch, tmp_path):
    given = {"max_draft_tokens": 8}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(given))
    for args in (
        make(spec_rollout=given),
        make(spec_rollout=json.dumps(given)),
        make(spec_rollout=str(path)),
        make(spec_rollout=SpecRolloutConfig(max_draft_tokens=8)),
        make(is_async=True, spec_rollout=given),
        make(additional_config={"spec_rollout": given}),
        parsed(model, "--spec-rollout", json.dumps(given)),
        parsed(model, "--spec-rollout", str(path)),
        parsed(model, "--spec-rollout.max_draft_tokens", "8"),
        parsed(model, "--additional-config", json.dumps({"spec_rollout": given})),
    ):
        assert engine_of(args.create_engine_config()) == OURS
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", json.dumps(given))
    assert engine_of(make().create_engine_config()) == OURS


def test_parsed_flags_keep_the_configuration_for_processes_that_load_plugins_later(model):
    from vllm.engine.arg_utils import EngineArgs

    args = arguments(model, "--spec-rollout", '{"max_draft_tokens": 8}')
    EngineArgs.from_cli_args(args)
    del args.spec_rollout  # such a process has no wrapper that would read it
    assert engine_of(EngineArgs.from_cli_args(args).create_engine_config()) == OURS


def test_the_flag_alone_means_the_defaults(model):
    config = parsed(model, "--spec-rollout").create_engine_config()
    assert config.additional_config == {"spec_rollout": SpecRolloutConfig().as_dict()}


def test_false_and_zero_outrank_the_environment_and_leave_no_trace(make, model, monkeypatch):
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "1")
    for args in (make(spec_rollout=False), parsed(model, "--spec-rollout", "0")):
        assert engine_of(args.create_engine_config()) == STOCK
        assert "VLLM_CPU_ATTN_SPLIT_KV" not in os.environ


def test_switched_off_the_configuration_is_the_one_stock_vllm_makes(make, model):
    ours = make().create_engine_config()
    patches.undo_all()
    try:
        from vllm.engine.arg_utils import EngineArgs

        assert not hasattr(EngineArgs.create_engine_config, "__wrapped__")
        stock = EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=256).create_engine_config()
    finally:
        # all of them, as the plugin does: what comes after in this process finds it as it was
        for process in patches.PROCESSES:
            patches.apply_all(process)
    assert ours.compute_hash() == stock.compute_hash()
    assert str(ours).replace(ours.instance_id, "") == str(stock).replace(stock.instance_id, "")


def test_switched_on_one_variable_is_set_for_row_invariant_attention_and_the_next_stock_engine_is_stock_again(make):
    make(spec_rollout=True).create_engine_config()
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "0" and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    make().create_engine_config()
    assert "VLLM_CPU_ATTN_SPLIT_KV" not in os.environ


def test_a_variable_the_user_set_is_kept(make, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    make(spec_rollout=True).create_engine_config()
    make().create_engine_config()
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "1"


def test_engine_arguments_may_be_used_twice(make):
    args = make(spec_rollout={"max_draft_tokens": 8})
    assert engine_of(args.create_engine_config()) == engine_of(args.create_engine_config()) == OURS
    assert args.worker_cls == "auto" and args.scheduler_cls is None and args.block_size is None


@pytest.mark.parametrize(
    "kwargs, size", [({}, 32), ({"block_size": 64}, 64), ({"num_gpu_blocks_override": 30}, STOCK[2])], ids=str
)
def test_blocks_are_as_small_as_ours_unless_the_user_gave_their_size_or_number(make, kwargs, size):
    assert make(spec_rollout={}, **kwargs).create_engine_config().cache_config.block_size == size


def test_the_users_other_additional_config_stays(make):
    given = {"other": 1, "spec_rollout": True}
    config = make(additional_config=given).create_engine_config()
    assert config.additional_config["other"] == 1 and given == {"other": 1, "spec_rollout": True}


KNOBS = ({"max_draft_tokens": 8}, {"budget": "fixed", "drafters": ["ngram"], "shape": "chain"})


def test_no_knob_of_ours_has_the_model_compiled_anew(make):
    """On CPU's V1 runner, the KV cache's blocks are of another size and scheduling is in lockstep: so is it in both."""
    alike = {"block_size": 64, "async_scheduling": False}
    stock, *ours = (make(**alike, spec_rollout=given).create_engine_config().compute_hash() for given in (None, *KNOBS))
    assert ours == [stock, stock]


def test_models_whose_layers_hand_out_hidden_states_are_not_taken_for_others():
    def hashed(**given):
        return Hashed({"spec_rollout": SpecRolloutConfig(**given).as_dict()}).compute_hash()

    head = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert hashed() != hashed(speculative_config=head)


@pytest.mark.parametrize("others, variable", [({"gdn_prefill_backend": "triton"}, "0"), ({}, "1")])
def test_what_others_read_of_it_or_measure_by_it_stays_a_dict(make, monkeypatch, others, variable):
    """vLLM's own models look for a dict; a measured size of the KV cache is found again by the hash."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", variable)
    configs = [
        make(block_size=64, additional_config={**others, "spec_rollout": given}).create_engine_config()
        for given in KNOBS
    ]
    assert all(type(config.additional_config) is dict for config in configs)
    assert configs[0].compute_hash() != configs[1].compute_hash()


def test_the_configuration_reaches_other_processes_and_copies_whole(make):
    config = make(spec_rollout={"max_draft_tokens": 8}).create_engine_config()
    for copied in (pickle.loads(pickle.dumps(config)), cloudpickle.loads(cloudpickle.dumps(config)), replace(config)):
        assert type(copied.additional_config) is Hashed and copied.additional_config == config.additional_config
        assert copied.compute_hash() == config.compute_hash()


def test_vllm_does_not_call_our_variable_unknown(make, monkeypatch):
    import vllm.envs

    # an engine in this process leaves variables that vLLM's own table does not list
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        if name not in vllm.envs.environment_variables:
            monkeypatch.delenv(name)
    monkeypatch.delitem(vllm.envs.environment_variables, "VLLM_SPEC_ROLLOUT", raising=False)
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "1")
    make(fail_on_environ_validation=True).create_engine_config()
    assert "VLLM_SPEC_ROLLOUT" in vllm.envs.environment_variables


def test_llm_from_engine_args_still_accepts_every_attribute(make):
    args = make(spec_rollout=True)
    assert "spec_rollout" not in vars(args)
    assert type(args)(**vars(args)).additional_config == args.additional_config


def test_metrics_of_each_request_reach_the_scheduler_past_vllms_check(make):
    args = make(spec_rollout=True, per_request_spec_decode_metrics="detailed")
    config = args.create_engine_config()
    assert config.additional_config["spec_rollout_request_metrics"] == "detailed"
    # else a copy of the configuration, which vLLM makes for some models, would be refused
    config.with_hf_config(config.model_config.hf_config)
    assert args.per_request_spec_decode_metrics == "detailed"


POOLING = dict(runner="pooling", convert="embed")
REFUSED = {
    "speculative config": dict(speculative_config={"model": "head", "num_speculative_tokens": 3}, spec_tokens=4),
    "pipeline parallel": dict(pipeline_parallel_size=2),
    "decode context parallel": dict(decode_context_parallel_size=2),
    "prefill context parallel": dict(prefill_context_parallel_size=2),
    "dual-batch overlap": dict(enable_dbo=True),
    "KV offloading": dict(kv_offloading_size=1.0),
    "KV sharing fast prefill": dict(kv_sharing_fast_prefill=True),
    "block size": dict(block_size=16),
    "worker class": dict(worker_cls="mine.Worker"),
    "scheduler class": dict(scheduler_cls="mine.Scheduler"),
    "routed experts on V1": dict(enable_return_routed_experts=True),
    "sampling masks on V1": dict(return_sampling_mask=True),
    "fp64 gumbel": dict(use_fp64_gumbel=True),
    "a drafter nowhere": dict(spec_rollout={"drafters": ["no.such:Drafter"]}),
    "a history nowhere": dict(spec_rollout={"history": {"dir": "/proc/none"}}),
    "a recording nowhere": dict(spec_rollout={"record": "/proc/none/t.zst"}),
    "pooling model": POOLING,
    "unknown key": dict(additional_config={"spec_rollout": {"max_draft_token": 8}}, spec_rollout=None),
}


def test_every_refusal_by_vllms_own_arguments_reads_as_recorded(make, recorded, render_refusals, monkeypatch):
    from vllm.config import KVTransferConfig

    def create(**kwargs):
        make(**{"spec_rollout": True, **kwargs}).create_engine_config()

    connector = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    cases = {title: lambda v=v: create(**v) for title, v in REFUSED.items()}
    cases["KV connector"] = lambda: create(kv_transfer_config=connector)
    text = render_refusals(cases)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    text += "\n" + render_refusals({"V2 runner": create})
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "/no/such/file")
    text += "\n" + render_refusals({"unreadable environment": lambda: make().create_engine_config()})
    assert text == recorded(Path(__file__).with_name("refusals.txt"), text)


@pytest.mark.parametrize(
    "kwargs, cause",
    [
        (POOLING, "the runner is `pooling`"),
        (dict(pipeline_parallel_size=2), "`--pipeline-parallel-size` is 2"),
        (dict(kv_transfer_config="OffloadingConnector"), "the KV connector is `OffloadingConnector`"),
        (dict(use_fp64_gumbel=True), "`--use-fp64-gumbel`"),
    ],
    ids=str,
)
def test_a_variable_is_a_wish_an_engine_that_spec_rollout_cannot_serve_is_stocks(make, monkeypatch, kwargs, cause):
    """It reaches every engine of a run, its reward models and teachers too."""
    from vllm.config import KVTransferConfig

    if name := kwargs.get("kv_transfer_config"):
        kwargs = {"kv_transfer_config": KVTransferConfig(kv_connector=name, kv_role="kv_both")}
    warnings: list[str] = []
    monkeypatch.setattr(engine_args.logger, "warning", lambda text, *given: warnings.append(text % given))
    stock = engine_of(make(**kwargs).create_engine_config())
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "1")
    assert engine_of(make(**kwargs).create_engine_config()) == stock
    (told,) = warnings
    assert "`VLLM_SPEC_ROLLOUT`" in told and cause in told
    assert not {"VLLM_CPU_ATTN_SPLIT_KV", "VLLM_USE_V2_MODEL_RUNNER"} & os.environ.keys()
    # a flag is a promise
    with pytest.raises(UnsupportedError):
        make(**kwargs, spec_rollout=True).create_engine_config()


@pytest.mark.parametrize("value", ['{"max_depht": 3}', "{", "/no/such/file", '{"drafters": []}'])
def test_a_variable_that_cannot_be_used_is_an_error_for_every_engine(make, monkeypatch, value):
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", value)
    for kwargs in ({}, POOLING):
        with pytest.raises(ConfigError):
            make(**kwargs).create_engine_config()


def test_where_vllm_would_run_its_v2_runner_on_cpu_ours_is_the_v1_one(make, monkeypatch):
    """Triton has a backend for CPU in vLLM's own image."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    args = make(spec_rollout=True)
    stock, ours, again = (made.create_engine_config() for made in (make(), args, args))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0" and not ours.use_v2_model_runner
    assert engine_of(ours) == engine_of(again)
    assert make().create_engine_config().use_v2_model_runner and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert stock.use_v2_model_runner, "by then"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedError, match="asks for vLLM's V2 model runner; on CPU, spec rollout runs the V1 one"):
        args.create_engine_config()


def test_a_flag_that_vllm_drops_on_cpu_is_no_error(make):
    assert make(spec_rollout=True, async_scheduling=True).create_engine_config().scheduler_config.scheduler_cls
    assert not make(async_scheduling=True).create_engine_config().scheduler_config.async_scheduling


def test_another_platform_than_cpu_or_cuda_is_refused(make, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ConfigError.__base__, match="CPU and CUDA"):
        make(spec_rollout=True).create_engine_config()


def test_drifted_source_is_refused_only_when_switched_on(make, monkeypatch):
    from vllm_specrollout.patches import supported

    monkeypatch.setattr(supported, "mismatches", lambda version: ["vllm.some:Thing.method"])
    make().create_engine_config()
    with pytest.raises(ConfigError.__base__, match="vllm.some:Thing.method"):
        make(spec_rollout=True).create_engine_config()


@pytest.mark.parametrize("program, error", [("vllm", SystemExit), ("train.py", ConfigError)])
def test_the_vllm_command_ends_in_the_message_and_a_program_gets_the_exception(
    model, make, monkeypatch, capsys, program, error
):
    monkeypatch.setattr("sys.argv", [f"/usr/bin/{program}", "serve"])
    with pytest.raises(error) as raised:
        type(make()).from_cli_args(argparse.Namespace(model=model, spec_rollout='{"max_depht": 3}'))
    if error is SystemExit:
        assert raised.value.code == 2
        assert capsys.readouterr().err == (
            "error: unknown key `max_depht` in `--spec-rollout`\n\nhint: did you mean `max_depth`?\n"
        )


@pytest.mark.parametrize("max_num_seqs", [1, 4, 32, 50, 256])
def test_capture_sizes_for_drafts_are_stocks_and_those_it_would_add(max_num_seqs):
    """vLLM's own derivation, for a GPU: without a size of the user's, and up to the one we come to."""
    from types import SimpleNamespace

    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    from vllm_specrollout.server.engine_args import capture_sizes

    def derived(most):
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=CompilationConfig(
                cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=most
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
            uniform_decode_query_len=1,
            speculative_config=None,
            performance_mode="balanced",
        )
        VllmConfig._set_cudagraph_sizes(config)
        return config.compilation_config.cudagraph_capture_sizes

    stock = derived(None)
    ours = capture_sizes(stock, max_num_seqs, 24, 8192)
    assert ours == sorted({*stock, *(size for size in derived(ours[-1]) if size > stock[-1])})
    assert ours[-1] >= min(512, 25 * max_num_seqs)
