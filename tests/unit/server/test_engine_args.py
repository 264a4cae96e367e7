"""What spec rollout changes in a configuration that vLLM has made: which steps are captured as CUDA graphs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.server import engine_args, engines, limits

STOCK_SIZES = [1, 2, 4, 8, 16, 24, 32]
WIDENED = [*STOCK_SIZES, *range(40, 257, 8), *range(272, 401, 16)]


def args_of(compilation=None, **given):
    """Engine arguments as far as they are looked at."""
    none = {"cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None}
    return SimpleNamespace(
        **{
            "additional_config": {"spec_rollout": {"max_draft_tokens": 24}},
            "compilation_config": SimpleNamespace(**{**none, **(compilation or {})}),
            "worker_cls": "auto",
            "scheduler_cls": None,
            "async_scheduling": None,
            "block_size": None,
            "num_gpu_blocks_override": None,
            "enable_return_routed_experts": False,
            "return_sampling_mask": False,
            "per_request_spec_decode_metrics": "none",
            **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens")),
            **none,
            **given,
        }
    )


def created(monkeypatch, args, *, engine=engines.GPU_V2, sizes=STOCK_SIZES):
    """The configuration that comes of `args` on a host for which `engine` is chosen, where vLLM captures `sizes`."""
    monkeypatch.setattr(engine_args, "_choose_engine", lambda: engine)
    monkeypatch.setattr(limits, "check_engine_args", lambda *checked: None)
    monkeypatch.setattr(limits, "check_vllm_config", lambda *checked: None)
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")

    def vllms_own(self):
        return SimpleNamespace(
            use_v2_model_runner=engine.uses_v2,
            additional_config=self.additional_config,
            scheduler_config=SimpleNamespace(
                async_scheduling=False, scheduler_cls=None, max_num_seqs=16, max_num_batched_tokens=8192
            ),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=max(sizes, default=0)
            ),
        )

    return engine_args.create(vllms_own)(args)


def sizes_of(config):
    compilation = config.compilation_config
    assert compilation.max_cudagraph_capture_size == max(compilation.cudagraph_capture_sizes, default=0)
    return compilation.cudagraph_capture_sizes


def test_steps_with_drafts_are_captured_too(monkeypatch):
    assert sizes_of(created(monkeypatch, args_of())) == WIDENED


@pytest.mark.parametrize("name, value", [("cudagraph_capture_sizes", [1, 8, 32]), ("max_cudagraph_capture_size", 32)])
@pytest.mark.parametrize("inside", [False, True], ids=["flag", "compilation config"])
def test_sizes_that_the_user_named_stay(monkeypatch, name, value, inside):
    args = args_of(compilation={name: value}) if inside else args_of(**{name: value})
    assert sizes_of(created(monkeypatch, args)) == STOCK_SIZES


def test_where_nothing_is_captured_and_on_other_runners_nothing_changes(monkeypatch):
    assert sizes_of(created(monkeypatch, args_of(), sizes=[])) == []
    assert sizes_of(created(monkeypatch, args_of(), engine=engines.GPU_V1)) == STOCK_SIZES


def test_switched_off_the_sizes_are_stocks(monkeypatch):
    assert sizes_of(created(monkeypatch, args_of(additional_config={}))) == STOCK_SIZES


def test_without_the_compiled_module_the_engine_says_how_to_get_it(monkeypatch):
    # None in sys.modules makes the import fail
    monkeypatch.setitem(sys.modules, "vllm_specrollout._core", None)
    with pytest.raises(UnsupportedError, match="_core") as caught:
        engine_args._require_core()
    assert "pip install" in caught.value.hint
