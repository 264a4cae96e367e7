"""Random models load in every architecture, are equal for equal seeds, and sample neither one token nor any."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vllm_specrollout.bench.policy.random_model import ARCHS, make_random_model  # noqa: E402

from vllm_specrollout.errors import ConfigError  # noqa: E402


def _load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("arch", ARCHS)
def test_next_token_entropy_is_moderate(arch, tmp_path):
    model = _load(make_random_model(tmp_path, arch, "1M"))
    ids = torch.randint(0, 400, (4, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        log_p = model(ids).logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean().item()
    assert 2.0 < entropy < 0.8 * math.log(407)


def test_equal_seeds_give_equal_files_and_other_seeds_do_not(tmp_path):
    files = [
        make_random_model(tmp_path / str(i), size="1M", seed=seed) / "model.safetensors"
        for i, seed in enumerate((5, 5, 6))
    ]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()


def test_the_sliding_window_reaches_the_config_and_hides_old_tokens(tmp_path):
    model = _load(make_random_model(tmp_path, "mistral", "1M", sliding_window=8, num_layers=1))
    assert model.config.sliding_window == 8
    ids = torch.arange(5, 45)[None]
    changed = ids.clone()
    changed[0, 0] = 300
    with torch.no_grad():
        want, got = model(ids).logits, model(changed).logits
    assert torch.equal(want[0, 20:], got[0, 20:])
    assert not torch.equal(want[0, 3], got[0, 3])


def test_a_larger_vocabulary_keeps_the_tokenizer(tmp_path):
    model = _load(make_random_model(tmp_path, size="1M", vocab_size=1000))
    assert model.lm_head.weight.shape[0] == 1000


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"arch": "gpt2"}, "`arch` names 'gpt2', which does not exist"),
        ({"size": "9B"}, "`size` names '9B', which does not exist"),
        ({"vocab_size": 10}, "`vocab_size` is 10, outside 407 to"),
        ({"sliding_window": 8}, "qwen3 has no sliding window, but 8 was given"),
        ({"num_layers": -1}, "`num_layers` is -1, outside 1 to"),
        ({"dtype": "int8"}, "`dtype` names 'int8'"),
    ],
)
def test_bad_arguments_are_errors_with_a_hint(arguments, cause, tmp_path):
    with pytest.raises(ConfigError, match=cause) as caught:
        make_random_model(tmp_path, **arguments)
    assert "\n\nhint: " in str(caught.value)
