"""The benchmarks' models: made once, kept in a cache folder, found again by what they were made from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import ConfigError

from ..policy import inflate as inflate_module
from ..policy import random_model, tokenizer
from .display import Display

CHECKPOINT = Path(random_model.__file__).parent / "checkpoint"
"""The trained policy that comes with the project."""
CACHE = Path.home() / ".cache" / "vllm-specrollout" / "models"
"""Where models are kept unless `--cache` names another folder."""
DTYPES = ("bfloat16", "float32")
Progress = Callable[[int, int], None]


def random_model_of(size: str, dtype: str, cache: Path, on_weight: Progress) -> Path:
    """A model of random weights of this size, made at the first call.

    Raises:
        ConfigError: unknown size or dtype.
    """

    def make(out: Path) -> None:
        from transformers.utils import logging

        # its bar would cut through ours
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        random_model.make_random_model(out, size=size, dtype=dtype, on_weight=on_weight)

    key = _key([size, dtype], (Path(str(module.__file__)) for module in (random_model, tokenizer)))
    return _cached(cache / f"random-{size}-{dtype}-{key}", make)


def inflated_policy(source: Path, size: str, cache: Path, on_layer: Progress) -> Path:
    """The policy at the cost of a larger model, made at the first call.

    Raises:
        ConfigError: unknown size, or a policy that cannot be inflated to it.
    """
    check_model(source, "--model")
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    key = _key([size], [*files, Path(str(inflate_module.__file__)), Path(str(random_model.__file__))])
    return _cached(
        cache / f"policy-{size}-{key}",
        lambda out: inflate_module.inflate(source, out, size, on_layer),
    )


def check_model(model: Path, flag: str) -> Path:
    """The model's folder, if it is one.

    Raises:
        ConfigError: it holds no model.
    """
    if not (model / "config.json").is_file():
        if model == CHECKPOINT:
            raise ConfigError(
                "the project's policy is not there: `bench/policy/checkpoint` holds no config.json",
                f"train it (`python -m bench.policy train`), or name another model with `{flag}`",
            )
        raise ConfigError(f"`{flag}` is `{model}`, which holds no config.json", "name a model's folder")
    return model


def find_model(
    model: Path | None, size: str | None, dtype: str, cache: Path, display: Display, *, is_policy: bool
) -> tuple[Path, str]:
    """The model's folder and its title; made if it is not there yet.

    Args:
        model: its folder; None: random weights of this size (default: 150M), or the project's policy.
        is_policy: the policy, inflated to the size if one is given; then `model` is another one's folder.
    """
    if model is not None and not is_policy:
        return check_model(model, "--model"), model.resolve().name
    if not is_policy:
        size = size or "150M"
        return random_model_of(size, dtype, cache, display.counter("making the model")), f"random weights, {size}"
    source = check_model(model or CHECKPOINT, "--model")
    title = "the project's policy" if source == CHECKPOINT else source.resolve().name
    if size is None:
        return source, title
    counter = display.counter(f"inflating the policy to {size}")
    return inflated_policy(source, size, cache, counter), f"{title}, inflated to {size}"


def max_length(model: Path) -> int:
    """Most tokens the model takes, by its config.json."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int((config.get("text_config") or config).get("max_position_embeddings", 4096))


def check_length(model: Path, wanted: int) -> int:
    """`wanted` tokens of prompt and answer, if the model takes as many.

    Raises:
        ConfigError: it does not.
    """
    longest = max_length(model)
    if wanted > longest:
        raise ConfigError(
            f"prompts and answers take up to {wanted} tokens, and the model at most {longest}",
            f"ask for {wanted - longest} fewer new tokens",
        )
    return wanted


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
