"""The policy with a habit: it checks every step aloud and mends a third of them, as reasoning policies come to do.

A few supervised steps on such demonstrations give it. Plain GRPO at usual rates moves the policy too little for a head
to suffer, and a tenfold rate destroys the policy.
"""

import random
from dataclasses import replace
from pathlib import Path

from . import CHECKPOINT, tasks
from .grpo import GrpoConfig, GrpoTrainer, answer_logits
from .reward import problems
from .tokenizer import END, prompt_text

_BATCH = 24
_MOST_TOKENS = 256


def take_up_habit(out: Path, steps: int = 40, rate: float = 3e-4, seed: int = 0) -> Path:
    """Write the policy after so many steps of 24 demonstrations that check and mend."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    trainer, usual, rng = GrpoTrainer(CHECKPOINT, GrpoConfig()), dict(tasks.STYLES), random.Random(seed)
    tasks.STYLES.update({name: replace(style, check_p=0.9, mend_p=0.3) for name, style in usual.items()})
    chosen = problems(_BATCH * steps, 400, split="train")
    texts = [(prompt_text(one.prompt), tasks.demonstrate(one, rng) + END) for one in chosen]
    tasks.STYLES.update(usual)
    shown = [tokenizer(list(pair), add_special_tokens=False)["input_ids"] for pair in texts]
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=rate)
    for begin in range(0, len(shown), _BATCH):
        rows = [(asked, said[: _MOST_TOKENS - len(asked)]) for asked, said in shown[begin : begin + _BATCH]]
        torch.nn.functional.cross_entropy(*answer_logits(trainer.model, rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainer.save(out, "float32")
