"""EAGLE-3 heads: made for a target, loaded, and saved in the `speculators` format, which vLLM loads.

What belongs here: how a head's shape follows from its target's, for EAGLE heads (eagle.py) too. The head and its
objective are the `speculators` library's (EAGLE-3, arXiv 2503.01840: training-time test); that library is imported when
a head is made.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_specrollout.errors import ConfigError, UnsupportedError

from .buffer import Source

_TYPES = ("llama", "qwen3")
"""Targets whose own kind of layer a head takes over; for all others it takes Llama's."""
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_KEPT = (*_SHAPE, "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act", "pad_token_id")


def require_speculators() -> Any:
    """The library. Raises: UnsupportedError, it is not installed."""
    try:
        import speculators
        import speculators.models.eagle3
        from loguru import logger
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"training a head needs `{error.name}`, which is not installed",
            'run `pip install "vllm-specrollout[train]"`',
        ) from None
    # it tells of every file that it opens
    logger.disable("speculators")
    return speculators


def new_head(target: Path, source: Source, num_levels: int, draft_vocab: Sequence[int] | None = None) -> Any:
    """A head with random weights for a target.

    Args:
        target: its folder; embedding and output head are taken from it.
        source: whose hidden states the head will learn from.
        num_levels: tokens ahead that it is trained for.
        draft_vocab: ascending token ids that it may draft; None: all.

    Raises:
        ConfigError: the hidden states are another model's.
        UnsupportedError: a target whose weights the library does not find.
    """
    speculators = require_speculators()
    shape = layer_config(target, source, _TYPES)
    config = speculators.Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=shape.vocab_size if draft_vocab is None else len(draft_vocab),
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=list(source.layers),
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[
                speculators.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=max(num_levels, 3))
            ],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig.from_pretrained(str(target)),
        ),
    )
    head = speculators.Eagle3DraftModel(config)
    if draft_vocab is not None:
        ids = torch.as_tensor(draft_vocab)
        head.load_vocab_mappings(
            torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(len(ids))
        )
    try:
        head.load_verifier_weights()
    except (KeyError, OSError, ValueError) as error:
        raise UnsupportedError(
            f"embedding and output head of `{target}` are not found: {error}",
            "give a folder with the target's safetensors",
        ) from None
    return _ready(head)


def load_head(folder: Path, source: Source) -> Any:
    """A head that was saved before, to be trained further.

    Raises:
        ConfigError: there is none in the folder, or it takes other hidden states.
    """
    speculators = require_speculators()
    try:
        config = speculators.Eagle3SpeculatorConfig.from_pretrained(str(folder))
        config.transformer_layer_config._attn_implementation = attention()
        head = speculators.Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32)
        head.load_verifier_weights()
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"`{folder}` is no EAGLE-3 head: {error}", "give a folder that `train-head` wrote") from None
    taken = (tuple(head.config.eagle_aux_hidden_state_layer_ids or ()), head.hidden_size)
    if taken != (source.layers, source.hidden_size):
        raise ConfigError(
            f"the head in `{folder}` takes {taken[1]} values each of layers {list(taken[0])}, the hidden states are"
            f" {source.hidden_size} of {list(source.layers)}",
            "collect with these layers (`collect.layers`), or train a new head",
        )
    return _ready(head)


def save_head(head: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the head; whoever reads the folder meanwhile finds the old one or the new one, whole."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    state = head.state_dict()
    ignored = set(head._keys_to_ignore_on_save)
    kept = {
        name: one.to(dtype) if one.is_floating_point() else one for name, one in state.items() if name not in ignored
    }
    head.save_pretrained(str(partial), state_dict=kept, max_shard_size="1TB")
    about = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    # it would point to a copy of the library's source, which is written too
    about.pop("auto_map", None)
    about["dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    # config.json last: with it, the folder is a head
    for name in ("model.safetensors", "config.json"):
        (partial / name).replace(folder / name)
    shutil.rmtree(partial)


def _ready(head: Any) -> Any:
    # the engine hands over what its output head reads, which is normalised already
    head.verifier_norm = torch.nn.Identity()
    head.lm_head.weight.requires_grad_(True)
    return head


def layer_config(target: Path, source: Source, types: Sequence[str]) -> Any:
    """The configuration of a head's one layer.

    Args:
        types: targets whose own kind of layer it may be; for all others it is Llama's.

    Raises:
        ConfigError: no such model, or the hidden states are another one's.
    """
    from transformers import AutoConfig, LlamaConfig

    try:
        config = AutoConfig.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{target}` is no model: {error}", "give the target's folder") from None
    config = getattr(config, "text_config", config)
    if config.hidden_size != source.hidden_size:
        raise ConfigError(
            f"hidden states have {source.hidden_size} values per token, `{target}` has {config.hidden_size}",
            f"name the target that they were collected from: {source.target}",
        )
    if config.model_type in types:
        shape = copy.deepcopy(config)
        if getattr(shape, "layer_types", None):
            shape.layer_types = ["full_attention"]
    else:
        shape = LlamaConfig(
            **{name: getattr(config, name) for name in _KEPT if getattr(config, name, None) is not None}
        )
        shape.dtype = config.dtype
    shape.num_hidden_layers = 1
    shape.tie_word_embeddings = False
    shape._attn_implementation = attention()
    return shape


def attention() -> str:
    """On a GPU the library's kernel leaves masked blocks out; elsewhere torch's own attention is faster."""
    return "simple_flex_attention" if torch.cuda.is_available() else "sdpa"
