import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.server import engine_args, engines, limits
from vllm_specrollout.server.engine_args import capture_sizes

STOCK_SIZES = [1, 2, 4, 8, 16, 24, 32]
SIZES_OF_VLLM = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
WIDENED = [size for size in SIZES_OF_VLLM if size <= 400]


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


def created(monkeypatch, args, *, engine=engines.GPU_V2, sizes=STOCK_SIZES, uses_v2=None):
    """The configuration that comes of `args` on a host for which `engine` is chosen, where vLLM captures `sizes`.

    Args:
        uses_v2: the model runner that vLLM chooses; None: that of the engine.
    """
    monkeypatch.setattr(engine_args, "_choose_engine", lambda: engine)
    monkeypatch.setattr(limits, "check_engine_args", lambda *checked: None)
    monkeypatch.setattr(limits, "check_vllm_config", lambda *checked: None)
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")

    def vllms_own(self):
        return SimpleNamespace(
            use_v2_model_runner=engine.uses_v2 if uses_v2 is None else uses_v2,
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


NAMED = [{"cudagraph_capture_sizes": [1, 8, 32]}, {"max_cudagraph_capture_size": 32}]


@pytest.mark.parametrize(
    "args, host, sizes",
    [
        pytest.param({}, {}, WIDENED, id="drafts"),
        pytest.param({}, {"sizes": []}, [], id="nothing is captured"),
        pytest.param({}, {"engine": engines.CPU_V1}, STOCK_SIZES, id="another runner"),
        pytest.param({"additional_config": {}}, {}, STOCK_SIZES, id="switched off"),
        *(pytest.param(named, {}, STOCK_SIZES, id="named by a flag") for named in NAMED),
        *(pytest.param({"compilation": named}, {}, STOCK_SIZES, id="named in the compilation") for named in NAMED),
    ],
)
def test_steps_with_drafts_are_captured_too_where_the_user_named_no_sizes(monkeypatch, args, host, sizes):
    assert sizes_of(created(monkeypatch, args_of(**args), **host)) == sizes


def test_where_vllm_takes_v1_on_cuda_a_wish_is_one_warning_and_stock_and_a_promise_an_error(monkeypatch, caplog):
    with pytest.raises(UnsupportedError, match="vLLM chose its V1 model runner") as refusal:
        created(monkeypatch, args_of(), uses_v2=False)
    assert "unset `VLLM_USE_V2_MODEL_RUNNER`" in refusal.value.hint
    monkeypatch.setenv("VLLM_SPEC_ROLLOUT", "1")
    args = args_of(additional_config={})
    config = created(monkeypatch, args, uses_v2=False)
    assert sizes_of(config) == STOCK_SIZES and config.scheduler_config.scheduler_cls is None
    assert args.worker_cls == "auto" and not args.additional_config
    (told,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "runs as stock vLLM" in told and "V1 model runner" in told


@pytest.mark.parametrize(
    ("max_num_reqs", "stock", "last"),
    [
        # vLLM stops at twice the requests
        (1, (1, 2), 32),
        (4, (1, 2, 4, 8), 104),
        (16, (1, 2, 4, 8, 16, 24, 32), 400),
        (32, SIZES_OF_VLLM[:11], 512),
        # as far as steps go that are captured unasked
        (256, SIZES_OF_VLLM, 512),
        # a model or a platform for which vLLM captures more
        (256, (*SIZES_OF_VLLM, 1024), 1024),
    ],
)
def test_capture_sizes_go_on_until_they_hold_steps_with_24_drafts(max_num_reqs, stock, last):
    sizes = capture_sizes(stock, max_num_reqs, 24, 8192)
    assert sizes[: len(stock)] == list(stock)
    assert sizes[-1] == last and set(sizes[len(stock) :]) <= set(SIZES_OF_VLLM)


def test_no_size_is_captured_that_no_step_has():
    assert capture_sizes((1, 2), 1, 1, 8192) == [1, 2]


@given(st.integers(1, 600), st.integers(1, 64), st.integers(64, 9000), st.integers(1, 80))
def test_stocks_sizes_all_stay_and_nothing_comes_between_them(max_num_reqs, drafts, max_tokens, count):
    stock = [size for size in SIZES_OF_VLLM[:count] if size <= max_tokens]
    sizes = capture_sizes(stock, max_num_reqs, drafts, max_tokens)
    assert sizes == sorted(set(sizes)) and sizes[: len(stock)] == stock and sizes[-1] <= max(max_tokens, stock[-1])
    assert sizes[-1] >= min(max_num_reqs * (1 + drafts), 512, max_tokens)


def test_without_the_compiled_module_the_engine_says_how_to_get_it(monkeypatch):
    # None in sys.modules makes the import fail
    monkeypatch.setitem(sys.modules, "vllm_specrollout._core", None)
    with pytest.raises(UnsupportedError, match="_core") as caught:
        engine_args._require_core()
    assert "pip install" in caught.value.hint
