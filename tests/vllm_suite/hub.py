"""Small random models under the names that vLLM's tests ask for, in the layout of a Hugging Face cache: nothing of them
can be downloaded in a test.

Drafts have something to do there: the output head makes one successor of each token likely, the successors form cycles
of 3 to 40 tokens, some of which end, and attention matters enough that a wrong key shows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

VOCAB, HIDDEN = 32_000, 128
SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<pad>", "<|begin_of_text|>"),
    *("<|eot_id|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
]
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}"
    "<|im_end|>\n{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
# name -> architecture, the end of an answer, what begins each prompt, positions, dtype
_QWEN3 = ("qwen3", "<|im_end|>", "", 40960, "bfloat16")
_QWEN2 = ("qwen2", "<|im_end|>", "", 32768, "bfloat16")
_LLAMA3 = ("llama", "<|eot_id|>", "<|begin_of_text|>", 131072, "bfloat16")
_LLAMA = ("llama", "</s>", "<s>", 2048, "bfloat16")
_GPT2 = ("gpt2", "<|endoftext|>", "", 1024, "float32")
MODELS: dict[str, tuple[str, str, str, int, str]] = {
    "Qwen/Qwen3-0.6B": _QWEN3,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2,
    "Qwen/Qwen2-1.5B-Instruct": _QWEN2,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN2,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA3,
    "meta-llama/Llama-3.2-1B": _LLAMA3,
    "meta-llama/Llama-2-7b-hf": _LLAMA,
    "meta-llama/llama-2-7b-hf": _LLAMA,
    "hmellor/tiny-random-LlamaForCausalLM": _LLAMA,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _LLAMA,
    "HuggingFaceH4/zephyr-7b-beta": ("mistral", "</s>", "<s>", 32768, "bfloat16"),
    "openai-community/gpt2": _GPT2,
    "distilbert/distilgpt2": _GPT2,
    "facebook/opt-125m": ("opt", "</s>", "</s>", 2048, "float16"),
}
# of more entries than the tokenizer, as the real one: tests name ids of it
_WIDE = {"facebook/opt-125m": 50272}


def make_hub(home: Path, corpus: Path) -> None:
    """Make what is not there yet; `corpus` is a folder of text that the tokenizer is trained on."""
    home.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        if not (home / "hub" / f"models--{name.replace('/', '--')}" / "refs" / "main").exists():
            _make(home, name, _tokenizer(home / "bpe.json", corpus))


def _tokenizer(path: Path, corpus: Path) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if not path.exists():
        core = Tokenizer(models.BPE())
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        specials = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train([str(file) for file in sorted(corpus.rglob("*.md"))], trainer)
        core.save(str(path))
    return Tokenizer.from_file(str(path))


def _make(home: Path, name: str, core: Tokenizer) -> None:
    import torch
    from tokenizers import processors
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    kind, end, begin, positions, dtype = MODELS[name]
    if begin:
        pair = (begin, core.token_to_id(begin))
        template = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[pair]
        )
        core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        bos_token=begin or None,
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=positions,
        chat_template=None if kind in ("opt", "gpt2") else TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    digest = hashlib.sha1(name.encode()).hexdigest()
    own = {"eos_token_id": core.token_to_id(end), "bos_token_id": core.token_to_id(begin) if begin else None}
    common = {"vocab_size": _WIDE.get(name, VOCAB), "pad_token_id": SPECIALS.index("<pad>"), "dtype": dtype, **own}
    config = AutoConfig.for_model(kind, tie_word_embeddings=False, **_sizes(kind, positions), **common)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, len(tokenizer), own["eos_token_id"], int(digest[:6], 16))
    model.to(getattr(torch, dtype)).generation_config.update(**own)
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    for part in (model, tokenizer):
        part.save_pretrained(root / "snapshots" / digest)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(digest)


def _sizes(kind: str, positions: int) -> dict[str, Any]:
    if kind == "gpt2":
        return {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": positions}
    shared = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
    shared["max_position_embeddings"] = positions
    if kind == "opt":
        return {**shared, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN}
    head = {} if kind == "qwen2" else {"head_dim": 64}
    return {**shared, "intermediate_size": 2 * HIDDEN, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, **head}


def _fill(model: Any, known: int, end: int, seed: int) -> None:
    """Weights of one seed; the head's rows point at the embedding of the token before."""
    import torch

    draw = torch.Generator().manual_seed(seed)

    def normal(shape: Any, std: float) -> torch.Tensor:
        return torch.empty(shape).normal_(0, std, generator=draw)

    for name, weight in sorted(model.named_parameters()):
        if weight.ndim == 1:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
        elif any(part in name for part in ("embed", "wte", "wpe")):
            weight.data.copy_(normal(weight.shape, 0.1 if "position" in name or "wpe" in name else 1.0))
        else:
            weight.data.copy_(normal(weight.shape, 0.6 / weight.shape[-1] ** 0.5))
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    after = _successors(len(embedding), known, end, draw)
    base = normal(head.shape, HIDDEN**-0.5)
    unit = embedding.data[:known] / embedding.data[:known].pow(2).mean(1, keepdim=True).sqrt()
    base[known:] = 0
    base.index_add_(0, after[:known], unit * (18 / HIDDEN))
    # the end follows many: its row is of their mean, which is small
    base[end] /= max(1, int((after[:known] == end).sum())) ** 0.5
    head.data.copy_(base)


def _successors(size: int, known: int, end: int, draw: torch.Generator) -> torch.Tensor:
    import torch

    order = len(SPECIALS) + torch.randperm(known - len(SPECIALS), generator=draw)
    after, at = torch.full((size,), end), 0
    while at < len(order):
        cycle = order[at : at + int(torch.randint(3, 41, (1,), generator=draw))]
        after[cycle] = cycle.roll(-1)
        if torch.rand(1, generator=draw) < 0.15:
            after[cycle[-1]] = end
        at += len(cycle)
    return after
