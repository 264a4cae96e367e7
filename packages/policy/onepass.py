"""Heads that give all levels in one pass, beside EAGLE-3: learnt from the same answers for the same seconds of a core.

Run: `python -m vllm_specrollout.bench.policy.onepass --seconds 120`. Without an engine: transformers computes the
policy's hidden states, the product's learner takes the steps, and a head is judged as a published one is, by the tokens
of a chain that shared noise would have accepted. Kinds:

- `eagle3`: a pass per level, each fed with the token drafted before.
- `masked`: one layer; levels from the second on are learned rows behind the last token, as in P-EAGLE and DFlash. No
  level knows what was drafted at another.
- `medusa`: a residual block and an output head for each level, over the target's last hidden state.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from vllm_specrollout.bench.policy import CHECKPOINT, HEAD
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from vllm_specrollout.training.heads import Source, load_head, new_head, shape_of, target_ends, unrolled
from vllm_specrollout.training.learner import NEW_RATE, TRAINED_RATE, Learner, LearnerConfig
from vllm_specrollout.training.rows import Rows
from vllm_specrollout.training.windows import WindowBatch, batch_of, whole

LEVELS, BATCH = 6, 64
KINDS = ("eagle3", "masked", "medusa")
TEMPERATURES = (1.0, 1.5)
PLAIN_S, ROW_S, PASS_S, DRAFTED_S = 60e-3, 2.3e-3, 10e-3, 0.38e-3
"""On two cores at 150 M, batch 1: a plain step, a verified row, a head's pass and a row of it (ADR 17)."""


class OnePass(torch.nn.Module):
    """What a learner asks of a head, whose levels are logits."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.config, self.lm_head = SimpleNamespace(norm_output=True), torch.nn.Identity()
        self.register_buffer("t2d", torch.ones(vocab, dtype=torch.bool), persistent=False)

    def levels(self, batch: WindowBatch, num_levels: int) -> Iterator[torch.Tensor]:
        """[B, W, vocab] each: level k's is about the token at place k + 1 behind a row."""
        raise NotImplementedError


class Masked(OnePass):
    """An EAGLE-3 head's layer; level k is fed a learned row at the k-th place behind the token.

    Args:
        head: as `heads.py` makes and loads it.
    """

    def __init__(self, head: Any, vocab: int) -> None:
        super().__init__(vocab)
        self.head = head
        self.rows = torch.nn.Parameter(torch.randn(LEVELS, 2, head.hidden_size) * 0.02)

    def levels(self, batch: WindowBatch, num_levels: int) -> Iterator[torch.Tensor]:
        shape, head, places = batch.positions.shape, self.head, iter(range(num_levels))

        def embedded(tokens: torch.Tensor) -> torch.Tensor:
            level = next(places)
            return head.embed_tokens(tokens) if level == 0 else self.rows[level, 0].expand(*shape, -1)

        fed = _Fed(head, embedded, self.rows[:, 1])
        for hidden in unrolled(fed, batch.tokens, batch.before, batch.positions, num_levels):
            yield head.lm_head(hidden if head.config.norm_output else head.norm(hidden))


class _Fed:
    """A head to `unrolled`, whose levels are fed learned rows in place of a token and of the level before."""

    def __init__(self, head: Any, embed_tokens: Any, rows: torch.Tensor) -> None:
        self._head, self.embed_tokens, self._rows = head, embed_tokens, rows
        self.layers, self._level = [self._layer], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def _layer(self, row: torch.Tensor, **given: Any) -> torch.Tensor:
        if self._level:
            half = row.shape[-1] // 2
            row = torch.cat([row[..., :half], self._rows[self._level].expand(*row.shape[:-1], -1)], dim=-1)
        self._level += 1
        return self._head.layers[0](row, **given)


class Medusa(OnePass):
    """A residual block and an output head a level, over the target's last hidden state; blocks of zeros at first."""

    def __init__(self, output_head: torch.Tensor) -> None:
        vocab, width = output_head.shape
        super().__init__(vocab)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LEVELS))
        self.outs = torch.nn.ParameterList(torch.nn.Parameter(output_head.clone()) for _ in range(LEVELS))
        for block in self.blocks:
            torch.nn.init.zeros_(block.weight)
            torch.nn.init.zeros_(block.bias)

    def levels(self, batch: WindowBatch, num_levels: int) -> Iterator[torch.Tensor]:
        last = batch.before[:, :, -1]
        for block, out in zip(self.blocks[:num_levels], self.outs, strict=False):
            yield (last + functional.silu(block(last))) @ out.T


class StudyLearner(Learner):
    """The product's learner, of any kind of head."""

    def _unrolled(self, batch: WindowBatch, num_levels: int) -> Iterator[torch.Tensor]:
        if isinstance(self.head, OnePass):
            return self.head.levels(batch, num_levels)
        return super()._unrolled(batch, num_levels)


@torch.no_grad()
def answers_of(
    model: Any, tokenizer: Any, layers: Sequence[int], count: int, temperature: float, split: str
) -> list[Rows]:
    """The policy's answers at a temperature, with what it computed for them."""
    tokenizer.padding_side = "left"
    texts = [prompt_text(one.prompt) for one in problems(count, seed=11, split=split)]
    found: list[Rows] = []
    for begin in range(0, count, BATCH):
        asked = tokenizer(texts[begin : begin + BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        asked.pop("token_type_ids", None)
        made = model.generate(**asked, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=192)
        for row, mask in zip(made, asked["attention_mask"], strict=True):
            own = row[len(mask) - int(mask.sum()) :]
            ends = (own[int(mask.sum()) :] == tokenizer.eos_token_id).nonzero()
            tokens = own[: int(mask.sum()) + int(ends[0]) + 1] if len(ends) else own
            out = model.model(tokens[None], output_hidden_states=True)
            states = [out.hidden_states[layer][0] for layer in layers] + [out.last_hidden_state[0]]
            found.append(Rows(tokens.int(), int(mask.sum()), 0, torch.stack(states, dim=1)))
    return found


def head_of(kind: str, source: Source, output_head: torch.Tensor, is_warm: bool) -> torch.nn.Module:
    """A head without training, or one whose layer is the shipped head's."""
    if kind == "medusa":
        return Medusa(output_head)
    head = load_head(HEAD, source) if is_warm else new_head(CHECKPOINT, source, LEVELS)
    return head if kind == "eagle3" else Masked(head, len(output_head))


def draft_s(learner: Learner, answers: Sequence[Rows], batch: int) -> float:
    """Seconds of a core for a draft of all levels for so many requests, what lies before them cached."""
    rows = batch_of(whole([max(answers, key=len)])[:1], LEVELS)
    is_one_pass = isinstance(learner.head, OnePass)
    is_masked = isinstance(learner.head, Masked)
    wide, passes = (batch * LEVELS if is_masked else batch), (1 if is_one_pass else LEVELS)
    inner = [getattr(rows, name)[:, :wide] for name in ("before", "last", "positions", "counts")]
    cut = WindowBatch(rows.tokens[:, : wide + LEVELS], *inner, rows.rest)
    levels = LEVELS if isinstance(learner.head, Medusa) else 1
    times = []
    with torch.no_grad():
        for _ in range(30):
            begin = time.process_time()
            for _ in range(passes):
                for one in learner._unrolled(cut, levels):
                    one if is_one_pass else learner.head.lm_head(learner.head.norm(one))
            times.append(time.process_time() - begin)
    return sorted(times)[len(times) // 2]


def per_step(met: Sequence[float], kind: str) -> tuple[float, int]:
    """Tokens in the time of a plain step, at the cost of 150 M and batch 1, and the number of levels that is best."""

    def at(levels: int) -> float:
        drafting = PASS_S * (levels if kind == "eagle3" else 1) + DRAFTED_S * levels
        return (sum(met[:levels]) + 1.0) / (1.0 + (levels * ROW_S + drafting) / PLAIN_S)

    return max((at(levels), levels) for levels in range(1, LEVELS + 1))


def study(
    kind: str, is_warm: bool, seconds: float, learnt: list[Rows], held_out: dict[float, list[Rows]], source: Source
) -> dict[str, Any]:
    """Train a head of the kind on some answers, and judge it on others of other problems, by temperature."""
    torch.manual_seed(0)
    _, output_head = target_ends(CHECKPOINT)
    rate = TRAINED_RATE if is_warm and kind == "eagle3" else NEW_RATE
    config = LearnerConfig(rate=rate, num_levels=LEVELS, dtype="float32")
    learner = StudyLearner(head_of(kind, source, output_head, is_warm), output_head, config)
    for one in learnt:
        learner.add(one)
    used = 0.0
    while used < seconds:
        begin = time.process_time()
        if learner.step() is None:
            break
        used += time.process_time() - begin
    found: dict[str, Any] = {"kind": kind, "warm": is_warm, "seconds": used, "rows": learner.rows}
    for temperature, answers in held_out.items():
        learner.retarget(output_head / temperature)
        judged = learner.judge(answers)
        assert judged is not None
        found[f"accepted at {temperature:g}"] = judged.accepted
        found[f"levels at {temperature:g}"] = judged.met
        found[f"per plain step at {temperature:g}"] = per_step(judged.met, kind)
    found["draft ms at 1, 8"] = [1e3 * draft_s(learner, learnt, batch) for batch in (1, 8)]
    return found


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a core, for each head")
    parser.add_argument("--answers", type=int, default=960)
    parser.add_argument("--warm", action="store_true", help="layers begin as the shipped head's")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    layers, width = shape_of(CHECKPOINT, HEAD)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    source = Source(str(CHECKPOINT), layers, width)
    learnt = answers_of(model, tokenizer, layers, asked.answers, 1.0, "train")
    held_out = {one: answers_of(model, tokenizer, layers, BATCH, one, "held_out") for one in TEMPERATURES}
    found = []
    for kind in asked.kinds.split(","):
        found.append(study(kind, asked.warm, asked.seconds, learnt, held_out, source))
        print(json.dumps(found[-1]), flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
