"""What the engines of a part have in common, and what their requests are. Pure but for a config.json that is written.

A model is a folder with a config.json and nothing else: vLLM fills in the weights.
"""

from __future__ import annotations

import bisect
import heapq
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import ConfigError

from ..kernels.shapes import MODELS as REAL_MODELS
from ..kernels.shapes import Model
from ..runner.interpreter import ENVIRONMENT as INTERPRETED

BLOCK = 64
"""Contexts are multiples of it, so that the prefix cache holds them whole in any engine's blocks."""
DRAFTS = {2.0: 3, 4.0: 7, 6.5: 15}
"""Tokens a step to reach -> draft nodes given to reach it."""
# `tiny` is for trying the script itself
MODELS = {**REAL_MODELS, "tiny": Model(2, 1, 64, 2, 512, 256)}
DUMMY = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    # several engines share the device; each one's KV cache is set, so this only has to be free
    "gpu_memory_utilization": 0.1,
}
"""Arguments of `vllm.LLM` for a model without weights."""
STOCK = "stock"
ARMS = ("chain", "tree")
RIVALS = ("ngram", "suffix", "draft_model")
MEMORY_ARMS: dict[str, tuple[int, ...] | None] = {
    "stock": None,
    "no graphs for drafts": (),
    "one draft size": (3,),
    "four draft sizes": (3, 6, 12, 24),
}
"""Engine -> draft sizes that it captures graphs for, the configured most and its halves down to 3."""
_STEP_SLACK = 4  # a request may be given drafts beyond its last token
_PER_OCTAVE = 4  # captured sizes between n and 2 n
_PATTERN = 32  # tokens that the prompts of the ngram arm repeat
_ALLOWED = 12  # tokens that its answers are made of, or random weights would never repeat themselves


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests at once, each with `context` tokens cached before the clock starts."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """`8x1024` -> Cell(8, 1024).

        Raises:
            ConfigError: anything else.
        """
        batch, _, context = text.partition("x")
        if not (batch.isdigit() and context.isdigit() and int(batch) and int(context)) or int(context) % BLOCK:
            raise ConfigError(
                f"`--cells` holds {text!r}",
                f"give BATCHxCONTEXT, CONTEXT a multiple of {BLOCK}: `--cells 1x1024,32x1024`",
            )
        return cls(int(batch), int(context))

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that stock's engine and ours share in one part."""

    model: str
    cells: tuple[Cell, ...]
    # most draft nodes of a request
    nodes: tuple[int, ...]
    # tokens generated per request
    tokens: int
    # of the random weights: 1 makes the model choose, 0.05 leaves it to the noise, and ties are rare
    logit_std: float
    drafters: tuple[str, ...] = ("oracle",)
    budget: str = "fixed"
    seed: int = 0
    is_eager: bool = False
    is_batch_invariant: bool = False
    # on a host without a GPU: small, and each engine in one process
    is_dry: bool = False
    # dry: on the V2 runner, its kernels interpreted
    is_interpreted: bool = False

    @property
    def max_model_len(self) -> int:
        return max(cell.context for cell in self.cells) + BLOCK + self.tokens + max(self.nodes) + _STEP_SLACK

    @property
    def kv_bytes(self) -> int:
        """KV cache that holds the largest cell to its end, with a block to spare per request."""
        room = self.tokens + max(self.nodes) + 2 * BLOCK
        most = max(cell.batch * (cell.context + room) for cell in self.cells)
        model = MODELS[self.model]
        return max(most, 2 * self.max_model_len) * model.layers * model.token_bytes

    @property
    def capture_sizes(self) -> list[int]:
        """Rows of a step that CUDA graphs are captured for: every batch, without drafts and with all of them."""
        exact = {cell.batch * (1 + n) for cell in self.cells for n in (0, *self.nodes)}
        sizes, octave = {1, 2, 4}, 4
        while octave < max(exact):
            sizes |= {octave + octave * i // _PER_OCTAVE for i in range(1, _PER_OCTAVE + 1)}
            octave *= 2
        return sorted({size for size in sizes if size < max(exact)} | exact)

    def arguments(self, folder: str) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for every engine."""
        sizes = self.capture_sizes
        # both, so that nobody chooses the one that is not given
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": max(sizes)}
        if self.is_dry:
            # nothing is compiled on a CPU: it would take most of a dry walk's time
            compilation["mode"] = 0
        return {
            "model": folder,
            **DUMMY,
            "seed": 0,
            "max_num_seqs": max(cell.batch for cell in self.cells),
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": True,
            "enforce_eager": self.is_eager,
            "kv_cache_memory_bytes": self.kv_bytes,
            "compilation_config": compilation,
        }

    def spec_rollout(self, shape: str, oracle: str) -> dict[str, Any]:
        """Our engine's configuration; requests choose their own number of drafts."""
        return {
            "drafters": list(self.drafters),
            "budget": self.budget,
            "shape": shape,
            "max_draft_tokens": max(self.nodes),
            "max_depth": max(self.nodes),
            "oracle": {"path": oracle},
        }

    def environment(self) -> dict[str, str]:
        """Variables of every engine's process."""
        # the log says what vLLM chose; functions are sent to workers to look, and to make weights
        changed = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "INFO", "PYTHONFAULTHANDLER": "1"}
        if self.is_batch_invariant and not self.is_dry:
            changed["VLLM_BATCH_INVARIANT"] = "1"
        if self.is_dry:
            changed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return {**changed, **(INTERPRETED if self.is_interpreted else {})}


def write_model(name: str, folder: Path, vocab: int | None = None) -> Path:
    """Write the config.json of the Qwen2.5 model into `folder` and return it.

    Args:
        vocab: in place of its own, for a drafter of a model with another vocabulary.
    """
    model = MODELS[name]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": model.heads * model.head_size,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": vocab or model.vocab,
        "max_position_embeddings": 1 << 16,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def memory_spec_rollout(sizes: tuple[int, ...] | None) -> dict[str, Any] | None:
    """Our configuration of an engine of MEMORY_ARMS; None: stock vLLM."""
    if sizes is None:
        return None
    most = max(sizes, default=24)
    config: dict[str, Any] = {"drafters": ["ngram"], "max_draft_tokens": most, "max_depth": most}
    return config if sizes else {**config, "max_graphs": 0}


def engine_of(row: Mapping[str, Any]) -> str:
    """The engine that a row is about, beside stock's."""
    arm = row.get("arm", STOCK)
    # drafts of the ngram arm grow beside the oracle's, in one engine; a rival of that name is vLLM's own
    return "tree" if arm == "ngram" and row["kind"] == "identity" else arm


def expected_tokens(accuracy: Sequence[float], nodes: int) -> float:
    """Tokens a step yields on average when the oracle drafts its best tree of `nodes` nodes with this accuracy."""
    total, reach = 1.0, [-share for share in accuracy]
    heapq.heapify(reach)
    for _ in range(nodes):
        best = -heapq.heappop(reach)
        total += best
        for share in accuracy:
            heapq.heappush(reach, -best * share)
    return total


def accuracy_for(tau: float, nodes: int, arm: str) -> tuple[float, ...]:
    """How often the oracle must be right, per rank, for `nodes` nodes to yield `tau` tokens a step.

    A tree's second rank holds half of what the first one misses.
    """

    def ranks(first: float) -> tuple[float, ...]:
        return (first,) if arm == "chain" else (first, (1 - first) / 2)

    low = bisect.bisect_left(range(1 << 40), tau, key=lambda i: expected_tokens(ranks(i / (1 << 40)), nodes)) - 1
    return tuple(round(share, 6) for share in ranks(low / (1 << 40)))


def prompts(cell: Cell, vocab: int, arm: str = "") -> list[list[int]]:
    """Random tokens: the context, and one token for the first step to compute. For `ngram` they repeat themselves."""
    rng = random.Random(f"{cell.batch}/{cell.context}/{arm == 'ngram'}")
    period = min(_PATTERN, cell.context // 2) if arm == "ngram" else cell.context + 1
    patterns = [rng.choices(range(vocab), k=period) for _ in range(cell.batch)]
    return [[pattern[i % period] for i in range(cell.context + 1)] for pattern in patterns]


def problem_id(request: int) -> str:
    """The oracle's key of one request."""
    return f"request-{request}"


def params(scene: Scene, cell: Cell, arm: str = "", nodes: int | None = None) -> list[dict[str, Any]]:
    """`SamplingParams` of each request: without drafts (nodes None), or with ours.

    Requests name their recorded answer. Those of `ngram` have none; every second one is greedy.
    """
    made: list[dict[str, Any]] = []
    for i in range(cell.batch):
        values = {"temperature": 1.0, "seed": scene.seed + i, "max_tokens": scene.tokens, "ignore_eos": True}
        if arm == "ngram":
            values |= {"temperature": float(i % 2), "allowed_token_ids": list(range(_ALLOWED))}
        if nodes is not None:
            problem = {} if arm == "ngram" else {"problem_id": problem_id(i)}
            values["extra_args"] = {"spec_rollout": {"max_draft_tokens": nodes, **problem}}
        made.append(values)
    return made


def rival(name: str, tau: float, draft_folder: str) -> dict[str, Any]:
    """vLLM's `speculative_config`, told to accept drafts so that a step yields `tau` tokens.

    Random weights accept nobody's drafts, so acceptance is synthetic (vLLM's own option). What a method does not
    draft cannot be accepted: on random text `ngram` and `suffix` find little, and `tokens_per_step` says so.
    """
    more = {"ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 4}, "draft_model": {"model": draft_folder}}
    return {
        "method": name,
        "num_speculative_tokens": DRAFTS[tau],
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": tau,
        **more.get(name, {}),
    }
