"""EAGLE heads (arXiv 2401.15077): one Llama layer over the token and the target's last hidden state before it.

What belongs here: the head as vLLM runs it, and its objective. It drafts with the target's embedding and output head,
and is trained to say what the target says, and to have the hidden states that the target has. The `speculators` library
has no such head; its losses, alignment and masks are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional

from vllm_specrollout.errors import ConfigError, UnsupportedError

from .buffer import Source
from .head import layer_config, require_speculators

_FILE = "model.safetensors"
_TYPES = ("llama",)
"""vLLM's EAGLE heads are Llamas, whatever the target."""


class EagleHead(torch.nn.Module):
    """The head; its `forward` is that of `speculators`' EAGLE-3 head.

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
    shape = layer_config(target, source, _TYPES)
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
