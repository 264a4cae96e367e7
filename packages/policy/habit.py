"""A study of heads that learn: what learning brings back after the policy took up a habit, and makes of a new head.

The habit: the policy checks every step aloud and mends a third of them, as reasoning policies come to do. A few
supervised steps on such demonstrations give it. Plain GRPO at usual rates moves the policy too little for a frozen head
to suffer. No engine takes part: transformers draws the answers and computes their hidden states, and heads are judged
in closed form on problems that nobody learned from.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import CHECKPOINT, HEAD, tasks
from .reward import problems
from .tokenizer import END, prompt_text

if TYPE_CHECKING:
    from vllm_specrollout.training.learner import Learner
    from vllm_specrollout.training.rows import Rows

_LAYERS = (1, 2, 3)
"""Whose inputs the shipped head takes."""
_MOST_TOKENS = 160
_BATCH = 96


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """All that the study depends on."""

    # Supervised steps of 24 demonstrations that the habit takes, and their learning rate.
    habit_steps: int = 40
    habit_rate: float = 3e-4
    # Problems to learn from, answers to each; problems to judge by, one answer each.
    problems: int = 160
    samples: int = 3
    judged: int = 40
    # Tokens ahead; rows after which heads are judged.
    levels: int = 6
    rows: tuple[int, ...] = (31_000, 65_000, 125_000)
    seed: int = 0


@dataclass(frozen=True)
class Learned:
    """How far a head has come."""

    arm: str
    rows: int
    # of one core, in training alone
    seconds: float
    # per draft
    accepted: float
    # share of the positions where the first draft is met
    first: float


class StudiedPolicy:
    """The policy in transformers."""

    def __init__(self, folder: Path = CHECKPOINT) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    def take_up_habit(self, config: StudyConfig) -> None:
        """Learn from demonstrations that check and mend."""
        import torch

        usual, rng = dict(tasks.STYLES), random.Random(config.seed)
        tasks.STYLES.update({name: replace(style, check_p=0.9, mend_p=0.3) for name, style in usual.items()})
        chosen = problems(24 * config.habit_steps, 400, split="train")
        shown = [(prompt_text(one.prompt), tasks.demonstrate(one, rng) + END) for one in chosen]
        tasks.STYLES.update(usual)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.habit_rate)
        for begin in range(0, len(shown), 24):
            rows, wanted = [], []
            for prompt, answer in shown[begin : begin + 24]:
                asked, said = (self.tokenizer(one, add_special_tokens=False)["input_ids"] for one in (prompt, answer))
                rows.append(torch.tensor(asked + said)[:256])
                wanted.append(torch.tensor([-100] * len(asked) + said)[:256])
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            labels = torch.nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=-100)
            self.model(ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def answers(self, count: int, samples: int, seed: int, split: str) -> "Iterator[Rows]":
        """Answers drawn at temperature 1, with what the policy computes for them."""
        import torch

        from vllm_specrollout.training.rows import Rows

        torch.manual_seed(seed)
        prompts = [prompt_text(one.prompt) for one in problems(count, seed, split=split) for _ in range(samples)]
        for begin in range(0, len(prompts), _BATCH):
            asked = self.tokenizer(
                prompts[begin : begin + _BATCH], add_special_tokens=False, padding=True, return_tensors="pt"
            )
            with torch.no_grad():
                drawn = self.model.generate(**asked, do_sample=True, top_k=0, max_new_tokens=_MOST_TOKENS)
                for tokens, mask in zip(drawn, asked["attention_mask"], strict=True):
                    prompt = int(mask.sum())
                    own = tokens[len(mask) - prompt :]
                    ends = (own[prompt:] == self.tokenizer.eos_token_id).nonzero()
                    own = own[: prompt + int(ends[0]) + 1] if len(ends) else own
                    out = self.model.model(own[None], output_hidden_states=True)
                    states = [*(out.hidden_states[layer][0] for layer in _LAYERS), out.last_hidden_state[0]]
                    yield Rows(own.int(), prompt, 1, torch.stack(states, dim=1))


def study(config: StudyConfig, policy: StudiedPolicy) -> Iterator[Learned]:
    """Arms: the shipped head before and after the habit, learning from then on; and a new head of the first policy."""
    yield from _arm("before the habit", config, policy, learns=False)
    yield from _arm("from nothing", config, policy, is_new=True)
    policy.take_up_habit(config)
    yield from _arm("after it", config, policy)


def _arm(
    name: str, config: StudyConfig, policy: StudiedPolicy, *, is_new: bool = False, learns: bool = True
) -> Iterator[Learned]:
    learner = _learner(config, policy, is_new)
    judges = list(policy.answers(config.judged, 1, 12, "held_out"))
    yield _learned(f"{name}, frozen", learner, judges, 0.0)
    seconds = 0.0
    for one in policy.answers(config.problems, config.samples, 11, "train") if learns else ():
        learner.add(one)
    for rows in config.rows if learns else ():
        begin = time.process_time()
        while learner.rows < rows and learner.step() is not None:
            pass
        seconds += time.process_time() - begin
        yield _learned(name, learner, judges, seconds)


def _learner(config: StudyConfig, policy: StudiedPolicy, is_new: bool) -> "Learner":
    import torch

    from vllm_specrollout.training.heads import Source, load_head, new_head
    from vllm_specrollout.training.learner import NEW_RATE, TRAINED_RATE, Learner, LearnerConfig

    torch.manual_seed(config.seed)
    source = Source(str(CHECKPOINT), _LAYERS, policy.model.config.hidden_size)
    head: Any = new_head(CHECKPOINT, source, config.levels) if is_new else load_head(HEAD, source)
    own = LearnerConfig(rate=NEW_RATE if is_new else TRAINED_RATE, num_levels=config.levels, seed=config.seed)
    return Learner(head, policy.model.get_output_embeddings().weight.detach().clone(), own)


def _learned(arm: str, learner: "Learner", judges: "Sequence[Rows]", seconds: float) -> Learned:
    found = learner.judge(judges)
    return Learned(arm, learner.rows, seconds, found.accepted, found.met[0])
