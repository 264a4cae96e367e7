"""Support: what may be drafted for a model and a request. What cannot be exact is not drafted, and the reason is said.

`specrollout doctor` and the reference page print TABLE; the worker asks `request_shape` and `model_shape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_specrollout.types import DraftMode


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table."""

    feature: str
    shape: DraftMode
    reason: str


_NODE = "applied at every node on that node's own history"
TREE, CHAIN, OFF = DraftMode.TREE, DraftMode.CHAIN, DraftMode.OFF
TABLE: tuple[Rule, ...] = (
    Rule("greedy, temperature", TREE, "exact match with vLLM's own noise"),
    Rule("seed, no seed", TREE, "the noise of token k is that of plain decoding; unseeded requests get a seed"),
    Rule("top_k, top_p, min_p", TREE, _NODE),
    Rule("presence, frequency, repetition penalty", TREE, _NODE),
    Rule("bad_words, logit_bias, allowed_token_ids, min_tokens", TREE, _NODE),
    Rule("max_tokens, stop_token_ids, ignore_eos", TREE, "no token that ends an answer is drafted"),
    Rule("stop, repetition_detection", TREE, "what follows a stop is dropped"),
    Rule("n > 1, logprobs, prompt_logprobs, logprob_token_ids", TREE, "taken from the target's rows"),
    Rule("prefix caching, chunked prefill, preemption, aborts, LoRA", TREE, "the drafts leave no trace"),
    Rule("multimodal models, with and without images", TREE, "behind the prompt, positions go on from where it ended"),
    Rule("models whose images attend in both directions", CHAIN, "a prompt may be computed beside branches"),
    Rule("tensor parallel", TREE, "rank 0 drafts, all ranks verify the same tree"),
    Rule("structured outputs (grammar, JSON schema, regex)", CHAIN, "the grammar follows one line of tokens"),
    Rule("penalties and bad_words, V2 runner", CHAIN, "its kernels find a row's history in the rows before it"),
    Rule("steps of more than 8 requests, V2 runner", CHAIN, "there, rows cost more than branches bring"),
    Rule("beside a model that drafts, V2 runner", CHAIN, "vLLM's speculators read what is accepted in the rows' order"),
    Rule("several KV cache groups (for example sliding and full attention)", CHAIN, "one block table per group"),
    Rule("FLASH_ATTN (FlashAttention 2 and 3) and softcap, V2 runner", TREE, "contexts are attended to by its kernels"),
    Rule(
        "other attention backends (TRITON_ATTN, FlashAttention 4, FlashInfer), V2 runner",
        CHAIN,
        "drafted for through their own attention",
    ),
    Rule(
        "sliding windows (Gemma 2 and 3, some Mistral), V2 runner",
        CHAIN,
        "FlashAttention counts a window by rows, and nodes stand at their depths",
    ),
    Rule("layers that share another one's KV cache, V2 runner", CHAIN, "they have no keys of the nodes at hand"),
    Rule(
        "quantised KV caches (fp8, int8, int4, nvfp4 and all others), V2 runner",
        CHAIN,
        "trees need one of the model's own type; with fp8 the query comes quantised as well",
    ),
    Rule(
        "ALiBi, attention sinks, R-SWA, attention in chunks, V2 runner",
        CHAIN,
        "the tree kernel knows none of them",
    ),
    Rule(
        "values of another size than keys, heads above 256, V2 runner",
        CHAIN,
        "the tree kernel takes no such heads",
    ),
    Rule("output quantised inside attention (`fuse_attn_quant`), V2 runner", CHAIN, "the tree kernel cannot"),
    Rule("multi-head latent attention, V2 runner", CHAIN, "it has no tree kernel"),
    Rule("thinking_token_budget", OFF, "its state follows one line of tokens and cannot be taken back"),
    Rule("streaming-input sessions", TREE, "each part is drafted for, and no draft goes beyond its end"),
    Rule(
        "streaming-input sessions with repetition_detection, or on the V2 runner",
        OFF,
        "a part may end amid a draft, of which vLLM would keep too much",
    ),
    Rule("prompt_embeds", OFF, "the prompt has no token ids"),
    Rule("custom logits processors", OFF, "they may keep state per request that a draft would disturb"),
    Rule("watermarking", OFF, "it replaces sampling"),
    Rule("token trace replay, V2 runner", TREE, "the trace's token stands for the target's own at every node"),
    Rule("models with recurrent state (Mamba, linear attention)", OFF, "a rejected token cannot be taken back"),
    Rule(
        "compressed KV caches (several tokens in one state), V2 runner",
        OFF,
        "a rejected token cannot be taken back",
    ),
    Rule("multi-head latent attention on CPU", OFF, "its CPU kernel verifies one token at a time"),
    Rule("encoder-decoder models, XD-RoPE", OFF, "not verified to be exact"),
)


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What of a request's sampling parameters bears on drafting."""

    is_enabled: bool = True
    has_grammar: bool = False
    has_thinking_budget: bool = False
    has_prompt_embeds: bool = False
    is_watermarked: bool = False
    is_trace_replay: bool = False
    ends_amid_drafts: bool = False
    """Whether a part of its session may end within an accepted path, of which vLLM would keep too much."""


def request_shape(traits: RequestTraits) -> tuple[DraftMode, str]:
    """What may be drafted for a request, and why not more."""
    if not traits.is_enabled:
        return DraftMode.OFF, "switched off by the request"
    if traits.has_thinking_budget:
        return DraftMode.OFF, "thinking_token_budget follows one line of tokens"
    if traits.ends_amid_drafts:
        return DraftMode.OFF, "a part of a streaming-input session may end amid a draft"
    if traits.has_prompt_embeds:
        return DraftMode.OFF, "the prompt is given as embeddings"
    if traits.is_watermarked or traits.is_trace_replay:
        return DraftMode.OFF, "watermarking, or a trace on this runner, takes the place of sampling"
    if traits.has_grammar:
        return DraftMode.CHAIN, "structured outputs follow one line of tokens"
    return DraftMode.TREE, ""


def model_shape(hf_config: Mapping[str, Any]) -> tuple[DraftMode, str]:
    """What a model allows, judged from its config.json alone; the engine judges again from its KV cache groups."""
    text = hf_config.get("text_config") or hf_config
    if hf_config.get("is_encoder_decoder"):
        return DraftMode.OFF, "encoder-decoder model"
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    recurrent = kinds - {"full_attention", "sliding_attention", "attention", "chunked_attention"}
    if recurrent or any(key in text for key in ("mamba_d_state", "ssm_cfg", "state_size", "linear_num_key_heads")):
        return DraftMode.OFF, "recurrent layers: a rejected token cannot be taken back"
    if text.get("kv_lora_rank"):
        return DraftMode.OFF, "multi-head latent attention: its CPU kernel verifies one token at a time"
    if len(kinds) > 1:
        return DraftMode.CHAIN, "layers of several attention kinds: one block table per kind"
    return DraftMode.TREE, ""
