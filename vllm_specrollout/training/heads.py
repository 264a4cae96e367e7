"""Heads of both kinds: made for a target, loaded, and saved as vLLM loads them.

What belongs here: how a head's shape follows from its target's, the EAGLE head (arXiv 2401.15077), and both kinds
unrolled level by level (training-time test, arXiv 2503.01840). EAGLE-3 heads are the `speculators` library's, which has
no EAGLE head. The library is imported when a head is made.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vllm_specrollout.errors import ConfigError, UnsupportedError

from .answers import KeptAnswer

UNTRAINED = "untrained"
"""File in the folder of a head that an engine only begins with: it drafts nothing until it has got a trained one."""
_FILE = "model.safetensors"
_OWN_LAYERS = {"eagle3": ("llama", "qwen3"), "eagle": ("llama",)}
"""Targets whose own kind of layer a head takes over; for all others it takes Llama's. vLLM's EAGLE heads always do."""
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_KEPT = (*_SHAPE, "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Source:
    """Whose hidden states a head takes."""

    # the target, as the engine was given it
    target: str
    # vLLM's ids of the layers whose inputs an EAGLE-3 head takes
    layers: tuple[int, ...]
    hidden_size: int


def layers_of(depth: int) -> tuple[int, ...]:
    """Low, middle and high layers, as EAGLE-3 takes them; shallow models have fewer than three."""
    wanted = (2, depth // 2, depth - 3) if depth > 6 else (1, depth // 2, depth - 1)
    return tuple(sorted({max(layer, 0) for layer in wanted}))


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
    shape = layer_config(target, source, _OWN_LAYERS["eagle3"])
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
        config.transformer_layer_config._attn_implementation = "sdpa"
        head = speculators.Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32)
        head.load_verifier_weights()
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"`{folder}` is no EAGLE-3 head: {error}", "give a folder that `train-head` wrote") from None
    taken = (tuple(head.config.eagle_aux_hidden_state_layer_ids or ()), head.hidden_size)
    if taken != (source.layers, source.hidden_size):
        raise ConfigError(
            f"the head in `{folder}` takes {taken[1]} values each of layers {list(taken[0])}, the hidden states are"
            f" {source.hidden_size} of {list(source.layers)}",
            "train a new head",
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
    for name in (_FILE, "config.json"):
        (partial / name).replace(folder / name)
    shutil.rmtree(partial)


class EagleHead(torch.nn.Module):
    """One Llama layer over the token and the target's last hidden state before it.

    It drafts with the target's embedding and output head, and is trained to say what the target says, and to have the
    hidden states that the target has.

    Args:
        config: `LlamaConfig` of the layer.
        embedding, output_head: [vocab, hidden] the target's; they are not trained, and not saved.
    """

    embedding: torch.Tensor
    output_head: torch.Tensor

    def __init__(self, config: Any, embedding: torch.Tensor, output_head: torch.Tensor) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.config = config
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer: Any = LlamaDecoderLayer(config, 0)
        # the paper's head has none here, and vLLM runs none
        layer.input_layernorm = torch.nn.Identity()
        self.layers = torch.nn.ModuleList([layer])
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("output_head", output_head.float(), persistent=False)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]


def new_eagle(target: Path, source: Source) -> EagleHead:
    """A head with random weights.

    Raises:
        ConfigError, UnsupportedError: as `new_head`.
    """
    shape = layer_config(target, source, _OWN_LAYERS["eagle"])
    return EagleHead(shape, *target_ends(target))


def load_eagle(folder: Path, target: Path, source: Source) -> EagleHead:
    """A head that was saved before, to be trained further.

    Raises:
        ConfigError: there is none in the folder, or it is another target's.
    """
    head = new_eagle(target, source)
    try:
        head.load_state_dict({name: one.float() for name, one in load_file(folder / _FILE).items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"`{folder}` is no EAGLE head for `{target}`: {error}", "give a folder that `train-head` wrote"
        ) from None
    return head


def target_ends(target: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A target's embedding and output head, [vocab, hidden] float32 each.

    Raises:
        UnsupportedError: the library does not find them.
    """
    require_speculators()
    from speculators.utils.loading import load_model_layers

    try:
        found = load_model_layers(["embed_tokens.weight", "lm_head.weight"], str(target))
    except (KeyError, OSError, ValueError) as error:
        raise UnsupportedError(
            f"embedding and output head of `{target}` are not found: {error}", "give a folder with its safetensors"
        ) from None
    embedding = found["embed_tokens.weight"].float()
    return embedding, found.get("lm_head.weight", embedding).float()


def save_eagle(head: EagleHead, folder: Path, dtype: torch.dtype) -> None:
    """Write the head in the form that vLLM loads with `"method": "eagle"`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: one.detach().to(dtype).contiguous() for name, one in head.state_dict().items()}
    save_file(weights, folder / f"{_FILE}.partial", {"format": "pt"})
    about = {**head.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": str(dtype).split(".")[-1]}
    (folder / f"{_FILE}.partial").replace(folder / _FILE)
    # config.json last: with it, the folder is a head
    (folder / "config.json").write_text(json.dumps(about, indent=2, default=str) + "\n", encoding="utf-8")


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
    shape._attn_implementation = "sdpa"
    return shape


def unrolled(
    head: Any, tokens: torch.Tensor, before: torch.Tensor, positions: torch.Tensor, num_levels: int
) -> Iterator[torch.Tensor]:
    """What a head makes of some rows, level by level, fed with the answer's own tokens (training-time test).

    A row attends to the rows before it, at the first level, and to itself at each.

    Args:
        tokens: [B, W + num_levels - 1] int64; level k is fed those from place k on.
        before: [B, W, layers + 1, width] the target's hidden states of the token before each row.
        positions: [B, W] int64.

    Yields:
        [B, W, width]: level k's is of the token at place k + 1 behind a row; `logits_of` reads it.
    """
    from transformers import DynamicCache

    is_eagle, width = isinstance(head, EagleHead), positions.shape[1]
    hidden = before[:, :, -1] if is_eagle else _fused(head, before[:, :, :-1].flatten(2))
    mask = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()[None, None]
    own = torch.eye(width, dtype=torch.bool, device=tokens.device)[None, None]
    cache = DynamicCache()
    for level in range(num_levels):
        row = torch.cat([head.embed_tokens(tokens[:, level : level + width]), hidden], dim=-1)
        if is_eagle:
            row = head.fc(row)
        hidden = row
        for layer in head.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=head.rotary_emb(row, positions + level),
            )
        if not is_eagle and head.config.norm_output:
            hidden = head.norm(hidden)
        yield hidden
        mask = torch.cat([mask, own], dim=-1)


def logits_of(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[..., draft vocabulary] of what `unrolled` yields."""
    if isinstance(head, EagleHead):
        return hidden @ head.output_head.T
    return head.lm_head(hidden if head.config.norm_output else head.norm(hidden))


def drafted_tokens(head: Any) -> torch.Tensor | None:
    """[vocabulary] bool: which tokens a head can draft; None: all."""
    return None if isinstance(head, EagleHead) else head.t2d


def _fused(head: Any, layers: torch.Tensor) -> torch.Tensor:
    """[B, W, width]: the hidden states of several layers, [B, W, layers * width], made one."""
    if head.input_norm is not None:
        layers = head.input_norm(layers)
    if head.fc_norm is not None:
        parts = zip(head.fc_norm, layers.chunk(len(head.fc_norm), dim=-1), strict=True)
        layers = torch.cat([norm(part) for norm, part in parts], dim=-1)
    return head.fc(layers)


def saved_dtype(head: Any) -> torch.dtype:
    """That of its target's checkpoint."""
    config = getattr(head.config, "transformer_layer_config", head.config)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def shape_of(target: Path, start: Path | None) -> tuple[tuple[int, ...], int]:
    """Layers whose hidden states a head takes, and how many values each has."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(target))
        config = getattr(config, "text_config", config)
        about = {} if start is None else json.loads((start / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{target}` or `{start}` is no model: {error}", "give folders of models") from None
    layers = about.get("eagle_aux_hidden_state_layer_ids") or layers_of(config.num_hidden_layers)
    return tuple(layers), config.hidden_size


def frequent_tokens(answers: Iterable[KeptAnswer], vocab_size: int, count: int) -> list[int]:
    """[count] token ids, ascending: those that were sampled most often."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        own = torch.from_numpy(answer.token_ids[answer.prompt_tokens :]).long()
        counts.index_add_(0, own, torch.ones_like(own))
    # what was never sampled comes last, in the order of the ids
    return sorted(counts.argsort(descending=True, stable=True)[:count].tolist())
