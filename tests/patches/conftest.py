"""What the tests of the patches share: a model's configuration without weights, and engine arguments made from it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A model's folder with nothing but config.json: enough to make an engine's configuration."""
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return str(folder)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("VLLM_SPEC_ROLLOUT", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"):
        # set first, so that what a test leaves behind is undone too
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def make(model):
    """Engine arguments for that model; `is_async` gives a server's."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    import vllm_specrollout  # noqa: F401  the keyword exists once we are imported

    def build(is_async: bool = False, **kwargs):
        cls = AsyncEngineArgs if is_async else EngineArgs
        return cls(**{"model": model, "skip_tokenizer_init": True, "max_model_len": 256, **kwargs})

    return build
