"""Inflated models compute the function of the small model they came from, bit for bit where the products allow."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vllm_specrollout.bench.policy.inflate import grown, inflate, inflate_head, read_shape  # noqa: E402
from vllm_specrollout.bench.policy.random_model import Shape, make_random_model  # noqa: E402

from vllm_specrollout.errors import ConfigError  # noqa: E402

SMALL = {"size": "1M", "hidden": 64, "num_layers": 2}
IDS = torch.randint(0, 400, (3, 40), generator=torch.Generator().manual_seed(0))
GROWN = Shape(hidden=256, num_layers=5, intermediate=512, num_heads=12, num_kv_heads=3)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, tmp_path_factory):
    """A small random model and its inflated twin, as folders."""
    folder = tmp_path_factory.mktemp(request.param)
    small = make_random_model(folder / "small", seed=1, dtype=request.param, **SMALL)
    return small, inflate(small, folder / "grown", GROWN)


def _load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def _logits(folder):
    """Logits [rows, length, vocab] in the model's dtype."""
    with torch.no_grad():
        return _load(folder)(IDS).logits


def _check_equal(want, got):
    assert want.std() > 1.0
    bound = 1e-4 if want.dtype == torch.float32 else 0.05
    assert (want.float() - got.float()).abs().max() <= bound * want.float().abs().max()


def test_inflated_logits_equal_the_small_models(pair):
    _check_equal(*map(_logits, pair))


def test_inflated_model_has_the_target_shape_and_dtype(pair):
    small, grown = pair
    config = json.loads((grown / "config.json").read_text())
    assert Shape.of_config(config) == GROWN
    assert config["rms_norm_eps"] == json.loads((small / "config.json").read_text())["rms_norm_eps"] / 4
    assert _load(grown).dtype == _load(small).dtype


def test_new_weights_of_the_small_model_reach_the_inflated_one_through_the_blocks_it_has(tmp_path):
    small = make_random_model(tmp_path / "small", seed=1, dtype="float32", **SMALL)
    large = _load(inflate(small, tmp_path / "grown", GROWN))
    learned = _load(make_random_model(tmp_path / "learned", seed=2, dtype="float32", **SMALL))
    old = read_shape(small)
    pushed = grown(dict(learned.named_parameters()), old, GROWN, old.num_layers)
    with torch.no_grad():
        assert not large.load_state_dict(pushed, strict=False).unexpected_keys
        _check_equal(learned(IDS).logits, large(IDS).logits)


def test_new_weights_are_random_where_they_read_and_zero_where_they_write(pair):
    from safetensors.torch import load_file

    weights = load_file(pair[1] / "model.safetensors")
    assert weights["model.layers.4.mlp.gate_proj.weight"].float().std() > 0.01
    assert not weights["model.layers.4.mlp.down_proj.weight"].any()
    assert not weights["model.layers.0.self_attn.o_proj.weight"][64:].any()
    smallest = min(w[w != 0].abs().min().item() for w in weights.values() if w.any())
    assert smallest > torch.finfo(torch.float32).tiny


def test_inflating_copies_the_tokenizer(pair):
    small, grown = pair
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (grown / name).read_text() == (small / name).read_text()


@pytest.mark.parametrize(
    ("hidden", "num_layers", "cause"),
    [(128, 2, "2 times, from 64 to 128; only powers of 4"), (64, 1, "num_layers would shrink from 2 to 1")],
)
def test_a_width_that_would_round_and_a_smaller_target_are_refused(pair, tmp_path, hidden, num_layers, cause):
    target = Shape(hidden=hidden, num_layers=num_layers, intermediate=384, num_heads=2, num_kv_heads=1)
    with pytest.raises(ConfigError, match=cause):
        inflate(pair[0], tmp_path, target)


def test_other_architectures_are_refused(tmp_path):
    llama = make_random_model(tmp_path / "llama", arch="llama", **SMALL)
    with pytest.raises(ConfigError, match="is a llama model"):
        inflate(llama, tmp_path / "out", GROWN)


def test_an_inflated_head_drafts_what_the_policys_own_head_does(tmp_path):
    pytest.importorskip("speculators")
    from vllm_specrollout.training.heads import Source, load_head, new_head, save_head

    small = make_random_model(tmp_path / "small", seed=3, dtype="float32", **SMALL)
    large = inflate(small, tmp_path / "grown", GROWN)
    torch.manual_seed(0)
    layers = (1, 2)
    save_head(new_head(small, Source(str(small), layers, 64), 2), tmp_path / "head", torch.float32)
    inflate_head(tmp_path / "head", large, tmp_path / "grown-head")
    own = load_head(tmp_path / "head", Source(str(small), layers, 64)).eval()
    grown = load_head(tmp_path / "grown-head", Source(str(large), layers, 256)).eval()
    ids, hidden = torch.randint(0, 400, (1, 50)), torch.randn(1, 50, 2, 64)
    padded = torch.nn.functional.pad(hidden, (0, 192))
    shared = {"input_ids": ids, "document_ids": torch.zeros(1, 50, dtype=torch.long), "ttt_steps": 2}
    with torch.no_grad():
        want = own(hidden_states=hidden.reshape(1, 50, -1), **shared)
        got = grown(hidden_states=padded.reshape(1, 50, -1), **shared)
    for level, (one, other) in enumerate(zip(want, got, strict=True)):
        assert len(one.unique()) > 5, "a head that always drafts the same would agree with anything"
        assert torch.equal(one, other), f"level {level + 1}"
