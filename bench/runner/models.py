"""The benchmarks' models: made once, kept in a cache folder, found again by what they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_specrollout.bench.policy import (
    CHECKPOINT,
    DRAFT,
    HEAD,
    VARIABLE,
    drift,
    inflate,
    random_model,
    tasks,
    tokenizer,
)

from vllm_specrollout.errors import ConfigError

from ..kernels.shapes import MODELS, Model
from .display import Display

CACHE = Path.home() / ".cache" / "vllm-specrollout" / "models"
"""Folder of models, unless `--cache` names another folder."""
DTYPES = ("bfloat16", "float32")
HABIT, SLOW = "habit", "slow"
"""Ways in which the policy moves: it checks its steps, or learns by reinforcement."""
DEPTH = 10
"""Levels that the shipped models may draft; `auto` ends a draft earlier where a further level does not pay."""
_RANDOM = {name: random_model.SHAPES[name] for name in ("3M", "150M", "400M")}
BARE = {
    **MODELS,
    **{
        name: Model(one.num_heads, one.num_kv_heads, one.head_dim, one.num_layers, 512, one.intermediate)
        for name, one in _RANDOM.items()
    },
    "tiny": Model(2, 1, 64, 2, 512, 256),
}
"""Shapes of models without weights; the tiny one is for trying the code itself."""


def find_model(
    model: Path | None, size: str | None, dtype: str, cache: Path, display: Display, *, is_policy: bool
) -> tuple[Path, str]:
    """The model's folder and its title; made if it is not there yet.

    Args:
        model: its folder; None: random weights of this size (default: 150M), or the project's policy.
        is_policy: the policy, inflated to the size if one is given; then `model` is another one's folder.
    """
    if model is not None or is_policy:
        source = _check_model(model or CHECKPOINT)
        title = "the project's policy" if is_policy and source == CHECKPOINT else source.resolve().name
        if size is None or not is_policy:
            return source, title
        counter = display.counter(f"inflating the policy to {size}")
        files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
        key = _key([size], [*files, Path(inflate.__file__), Path(random_model.__file__)])
        folder = _cached(cache / f"policy-{size}-{key}", lambda out: inflate.inflate(source, out, size, counter))
        return folder, f"{title}, inflated to {size}"
    wanted, counter = size or "150M", display.counter("making the model")

    def make(out: Path) -> None:
        from transformers.utils import logging

        # its bar would cut through ours
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        random_model.make_random_model(out, size=wanted, dtype=dtype, on_weight=counter)

    key = _key([wanted, dtype], [Path(random_model.__file__), Path(tokenizer.__file__)])
    return _cached(cache / f"random-{wanted}-{dtype}-{key}", make), f"random weights, {wanted}"


def shipped_drafters(
    target: Path, size: str | None, cache: Path, depths: tuple[int, ...] = (DEPTH,)
) -> dict[str, dict[str, Any]]:
    """Name -> `speculative_config` of the models that draft for the project's policy.

    Args:
        target: the policy, inflated to the size if one is given; then the head is, too. The draft model, a quarter of
            the policy's own size, is there for that alone.
        depths: levels that a model may draft; with several, the head is there in each, and the draft model is not.
    """
    head = HEAD
    if size is not None:
        key = _key([size], [*sorted(HEAD.glob("*.*")), target / "config.json", Path(inflate.__file__)])
        head = _cached(cache / f"head-{size}-{key}", lambda out: inflate.inflate_head(HEAD, target, out))
    own = {"method": "eagle3", "model": str(head)}
    if len(depths) > 1:
        return {f"head, {depth} levels": {**own, "num_speculative_tokens": depth} for depth in depths}
    found = {"head": {**own, "num_speculative_tokens": depths[0]}}
    if size is None:
        found["draft"] = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": depths[0]}
    return found


def moved_policy(by: str, cache: Path) -> Path:
    """The project's policy after it took up a habit, or moved slowly: its shape, other answers."""
    files = [*sorted(CHECKPOINT.glob("*.safetensors")), Path(drift.__file__), Path(tasks.__file__)]
    make = {HABIT: drift.take_up_habit, SLOW: drift.move_slowly}[by]
    return _cached(cache / f"policy-{by}-{_key([by], files)}", make)


def quarter_drafter(size: str, cache: Path) -> Path:
    """The project's draft model with the cost of a quarter of a size: half as wide, as many blocks."""
    whole = random_model.shape_of_size(size)
    shape = replace(
        whole,
        hidden=whole.hidden // 2,
        intermediate=whole.intermediate // 2,
        num_heads=whole.num_heads // 2,
        num_kv_heads=whole.num_kv_heads // 2,
    )
    files = [DRAFT / "config.json", *sorted(DRAFT.glob("*.safetensors"))]
    key = _key([str(shape)], [*files, Path(inflate.__file__)])
    return _cached(cache / f"draft-quarter-{size}-{key}", lambda out: inflate.inflate(DRAFT, out, shape))


def bare_model(name: str, folder: Path) -> Path:
    """Write the config.json of a Qwen2.5 model, all that vLLM needs to make up its weights; its folder."""
    model = BARE[name]
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
        "vocab_size": model.vocab,
        "max_position_embeddings": 1 << 16,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _check_model(model: Path) -> Path:
    if (model / "config.json").is_file():
        return model
    if model == CHECKPOINT:
        raise ConfigError(
            f"the project's policy is not there: `{CHECKPOINT}` holds no config.json",
            f"it comes with the checkout: set {VARIABLE} to its `packages/policy`, or name a model with `--model`",
        )
    raise ConfigError(f"`--model` is `{model}`, which holds no config.json", "name a model's folder")


def check_length(model: Path, wanted: int) -> None:
    """Refuse more tokens of prompt and answer than the model takes by its config.json."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    longest = int((config.get("text_config") or config).get("max_position_embeddings", 4096))
    if wanted > longest:
        raise ConfigError(
            f"prompts and answers take up to {wanted} tokens, and the model at most {longest}",
            f"ask for {wanted - longest} fewer new tokens",
        )


def _key(words: Iterable[str], files: Iterable[Path]) -> str:
    digest = hashlib.sha256("/".join(words).encode())
    for path in files:
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:12]


def _cached(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Make `folder` if it is not there; complete or not at all, also when two make it at once."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        made = Path(scratch) / "model"
        make(made)
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "config.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(made, folder)
    return folder
