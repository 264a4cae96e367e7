"""A small target that counts, and its answers' rows: what a head can learn in seconds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_specrollout.training.answers import KeptAnswer
from vllm_specrollout.training.heads import Source
from vllm_specrollout.training.rows import Rows

VOCAB, HIDDEN, LAYERS = 24, 16, (1, 2)
SOURCE = Source("target", LAYERS, HIDDEN)


def make_target(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=64, head_dim=8, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def counting(count: int, length: int = 40, first: int = 0) -> list[KeptAnswer]:
    """Answers that count upwards, each with another step."""
    made = [(np.arange(length) * (1 + i // VOCAB) + i) % VOCAB for i in range(first, first + count)]
    return [KeptAnswer(one.astype(np.int32), 3, 0) for one in made]


class Prefilled:
    """In the place of an engine: what transformers computes. Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, target: Path, layers: tuple[int, ...], answers: Sequence[KeptAnswer]):
        model = LlamaForCausalLM.from_pretrained(target).eval()
        self.asked.append(len(answers))
        for one in answers:
            tokens = torch.from_numpy(one.token_ids)
            with torch.no_grad():
                out = model.model(tokens[None].long(), output_hidden_states=True)
            states = [out.hidden_states[layer][0] for layer in layers] + [out.last_hidden_state[0]]
            yield Rows(tokens, one.prompt_tokens, one.version, torch.stack(states, dim=1))
