"""Models that take more than text, small and random: one that looks at images, and one whose positions have several
dimensions (M-RoPE), as behind images. No image is needed for the latter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

IMAGE = "<image>"
SIZE, PATCH = 56, 14


def random_weights(model: Any) -> None:
    """Every layer keeps the scale of its input, and logits are neither fixed nor uniform."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else weight[0].numel() ** -0.5)
                weight.mul_(2.5 if "lm_head" in name else 1.0)


def _text(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
    }


def seeing_model(folder: Path) -> tuple[str, int]:
    """An Idefics3, made once per folder; and the token that stands for an image."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )
    from vllm_specrollout.bench.policy.tokenizer import build_tokenizer

    path, tokenizer = folder / "seeing", build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, "<fake_token_around_image>", "<global-img>"]})
    image_token = int(tokenizer.convert_tokens_to_ids(IMAGE))
    if path.exists():
        return str(path), image_token
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    text = LlamaConfig(**_text(len(tokenizer)), eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    config = Idefics3Config(vision_config=vision, text_config=text, image_token_id=image_token, scale_factor=2)
    model = Idefics3ForConditionalGeneration(config)
    random_weights(model)
    model.save_pretrained(path)
    longest = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=longest, max_image_size=longest, do_image_splitting=False)
    sequence = (SIZE // PATCH) ** 2 // 2**2
    Idefics3Processor(images, tokenizer, image_seq_len=sequence).save_pretrained(path)
    return str(path), image_token


def picture(seed: int) -> Any:
    """Noise, as vLLM takes images."""
    from PIL import Image

    draw = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (SIZE, SIZE, 3), generator=draw, dtype=torch.uint8).numpy())


class Turning(Qwen2ForCausalLM, SupportsMRoPE):
    """Its prompts' positions fall behind the tokens' number, in each dimension otherwise, as those of images do."""

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[torch.Tensor, int]:
        places = torch.arange(len(input_tokens))
        found = torch.stack([places - places // 3, places - places // 2, places // 2])
        return found, int(found.max()) + 1 - len(input_tokens)


def turning_model(folder: Path) -> str:
    """A Qwen2 with M-RoPE, made once per folder, which vLLM knows from now on."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from vllm_specrollout.bench.policy.tokenizer import build_tokenizer

    ModelRegistry.register_model(Turning.__name__, f"{__name__}:{Turning.__name__}")
    path, tokenizer = folder / "turning", build_tokenizer()
    if not path.exists():
        model = Qwen2ForCausalLM(Qwen2Config(**_text(len(tokenizer)), eos_token_id=tokenizer.eos_token_id))
        random_weights(model)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
        config |= {"architectures": [Turning.__name__], "rope_parameters": rope}
        (path / "config.json").write_text(json.dumps(config))
    return str(path)
