"""The policy that moved: by a habit that it takes up, or by a few updates of reinforcement learning.

With the habit it checks every step aloud and mends a third of them, as reasoning policies come to do. A few supervised
steps on such demonstrations give it. Plain GRPO at usual rates moves the policy too little for a head to suffer, and a
tenfold rate destroys the policy.
"""

import random
from dataclasses import replace
from pathlib import Path

from . import CHECKPOINT, tasks
from .grpo import AnswerGroup, GrpoConfig, GrpoTrainer, answer_logits
from .reward import problems, reward
from .tokenizer import END, prompt_text

_BATCH = 24
_MOST_TOKENS = 256
_SAMPLES, _ANSWER_TOKENS = 4, 160
"""Of an update by GRPO."""


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


def move_slowly(out: Path, updates: int = 4, num_problems: int = 12, seed: int = 0) -> Path:
    """Write the policy after so many updates by GRPO at the usual rate, each on its own 4 answers to some problems."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    trainer = GrpoTrainer(CHECKPOINT, GrpoConfig())
    for update in range(updates):
        groups = []
        for problem in problems(num_problems, 100 + update, split="train"):
            asked = tokenizer(prompt_text(problem.prompt), add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.random.fork_rng():
                torch.manual_seed(seed + 1000 * update + len(groups))
                said = trainer.model.generate(
                    asked, do_sample=True, top_k=0, max_new_tokens=_ANSWER_TOKENS, num_return_sequences=_SAMPLES
                )[:, asked.shape[1] :]
            answers = [_until(row.tolist(), tokenizer.eos_token_id) for row in said]
            rewards = tuple(reward(problem, tokenizer.decode(one, skip_special_tokens=True)) for one in answers)
            groups.append(AnswerGroup(prompt_ids=tuple(asked[0].tolist()), answers=tuple(answers), rewards=rewards))
        trainer.update(groups)
    return trainer.save(out, "float32")


def _until(answer: list[int], end: int) -> tuple[int, ...]:
    """With its end token, without what fills the batch up."""
    return tuple(answer[: answer.index(end) + 1] if end in answer else answer)
