"""Heads of both kinds: made for a target, loaded, and saved as vLLM loads them.

What belongs here: how a head's shape follows from its target's, and the EAGLE head (arXiv 2401.15077) with its
objective. EAGLE-3 heads and theirs are the `speculators` library's (arXiv 2503.01840: training-time test). It has no
EAGLE head, but its losses, alignment and masks serve there too. The library is imported when a head is made.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional

from vllm_specrollout.errors import ConfigError, UnsupportedError

from .buffer import Source

_FILE = "model.safetensors"
_OWN_LAYERS = {"eagle3": ("llama", "qwen3"), "eagle": ("llama",)}
"""Targets whose own kind of layer a head takes over; for all others it takes Llama's. vLLM's EAGLE heads always do."""
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
    for name in (_FILE, "config.json"):
        (partial / name).replace(folder / name)
    shutil.rmtree(partial)


class EagleHead(torch.nn.Module):
    """One Llama layer over the token and the target's last hidden state before it.

    It drafts with the target's embedding and output head, and is trained to say what the target says, and to have the
    hidden states that the target has. Its `forward` is that of `speculators`' EAGLE-3 head.

    Args:
        config: `LlamaConfig` of the layer.
        embedding, output_head: [vocab, hidden] the target's; they are not trained, and not saved.
        feature_weight: weight of the distance to the target's hidden states beside the loss of the tokens.
    """

    def __init__(self, config: Any, embedding: torch.Tensor, output_head: torch.Tensor, feature_weight: float) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.config, self.feature_weight = config, feature_weight
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = LlamaDecoderLayer(config, 0)
        # the paper's head has none here, and vLLM runs none
        layer.input_layernorm = torch.nn.Identity()
        self.layers = torch.nn.ModuleList([layer])
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("output_head", output_head.float(), persistent=False)

    def forward(
        self,
        *,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        document_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        verifier_last_hidden_states: torch.Tensor,
        ttt_steps: int,
        ttt_step_loss_decay: float,
        loss_config: Any,
    ) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
        """(each level's greedy drafts [1, T], the loss, its parts); arguments as in `Batch`, but for
        `hidden_states` [1, T, hidden], which are the target's last ones, of the token before each place.
        """
        from speculators.models.eagle3.attention import extend_dense_mask_for_draft_tokens
        from speculators.models.eagle3.metrics import compute_metrics
        from transformers import DynamicCache

        length = input_ids.shape[1]
        mask, cache = _mask(document_ids[0]), DynamicCache()
        with torch.no_grad():
            targets = verifier_last_hidden_states @ self.output_head.T
        loss, metrics, drafts = torch.zeros((), device=input_ids.device), {}, []
        so_far = loss_mask.clone()
        for level in range(ttt_steps):
            # the answer's own tokens are fed, whatever was drafted
            tokens = functional.pad(input_ids[:, level:], (0, level))
            hidden_states = self.fc(torch.cat([self.embedding[tokens], hidden_states], dim=-1))
            hidden_states = self.layers[0](
                hidden_states,
                attention_mask=mask,
                past_key_values=cache,
                position_embeddings=self.rotary_emb(hidden_states, position_ids + level),
            )
            logits = hidden_states @ self.output_head.T
            own, found = compute_metrics(
                logits, targets, loss_mask, so_far, level, ttt_step_loss_decay, loss_config=loss_config
            )
            features = _feature_loss(hidden_states, verifier_last_hidden_states, loss_mask, level)
            loss = loss + own + self.feature_weight * ttt_step_loss_decay**level * features
            metrics.update(found)
            drafts.append(logits.argmax(dim=-1))
            mask = extend_dense_mask_for_draft_tokens(mask, length)
        return drafts, loss, metrics


def new_eagle(target: Path, source: Source, feature_weight: float) -> EagleHead:
    """A head with random weights.

    Raises:
        ConfigError, UnsupportedError: as `new_head`.
    """
    require_speculators()
    from speculators.utils.loading import load_model_layers

    try:
        found = load_model_layers(["embed_tokens.weight", "lm_head.weight"], str(target))
    except (KeyError, OSError, ValueError) as error:
        raise UnsupportedError(
            f"embedding and output head of `{target}` are not found: {error}", "give a folder with its safetensors"
        ) from None
    embedding = found["embed_tokens.weight"]
    shape = layer_config(target, source, _OWN_LAYERS["eagle"])
    return EagleHead(shape, embedding, found.get("lm_head.weight", embedding), feature_weight)


def load_eagle(folder: Path, target: Path, source: Source, feature_weight: float) -> EagleHead:
    """A head that was saved before, to be trained further.

    Raises:
        ConfigError: there is none in the folder, or it is another target's.
    """
    head = new_eagle(target, source, feature_weight)
    try:
        head.load_state_dict({name: one.float() for name, one in load_file(folder / _FILE).items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"`{folder}` is no EAGLE head for `{target}`: {error}", "give a folder that `train-head` wrote"
        ) from None
    return head


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
    shape._attn_implementation = attention()
    return shape


def attention() -> str:
    """On a GPU the library's kernel leaves masked blocks out; elsewhere torch's own attention is faster."""
    return "simple_flex_attention" if torch.cuda.is_available() else "sdpa"


def _mask(document_ids: torch.Tensor) -> torch.Tensor:
    """[1, 1, T, T] bool: a place attends to its example's places up to itself."""
    places = torch.arange(len(document_ids), device=document_ids.device)
    is_before = places[:, None] >= places[None, :]
    return (is_before & (document_ids[:, None] == document_ids[None, :]))[None, None]


def _feature_loss(hidden: torch.Tensor, of_target: torch.Tensor, loss_mask: torch.Tensor, level: int) -> torch.Tensor:
    """Smooth L1 distance per value, over the places that count."""
    length = hidden.shape[1] - level
    counts = loss_mask[:, level:]
    distance = functional.smooth_l1_loss(hidden[:, :length], of_target[:, level:], reduction="none").mean(dim=-1)
    return (distance * counts).sum() / counts.sum().clamp(min=1)
