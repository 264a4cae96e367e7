"""Every environment variable this project reads or sets. One table; a value that cannot be used is an error."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_specrollout.errors import ConfigError, shown, shown_path

SPEC_ROLLOUT = "VLLM_SPEC_ROLLOUT"
CPU_ATTN_SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
CACHE_HOME = "XDG_CACHE_HOME"
STRICT = "SPECROLLOUT_STRICT"
MAX_BODY_MIB = "SPECROLLOUT_MAX_BODY_MIB"
DRAFTERS = "SPECROLLOUT_DRAFTERS"
KEY = "SPECROLLOUT_KEY"
ENDS_WITH_PARENT = "SPECROLLOUT_ENDS_WITH_PARENT"
USE_V2_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable and what it does here."""

    name: str
    meaning: str
    is_ours: bool


TABLE = (
    Variable(
        SPEC_ROLLOUT,
        "switches speculation on where it can serve: `1`, a JSON object or the path of a JSON file; `0` is off",
        True,
    ),
    Variable(CPU_ATTN_SPLIT_KV, "set to `0` when speculation is on, so that a row's bits ignore its neighbours", False),
    Variable(
        USE_V2_MODEL_RUNNER,
        "set to `0` with speculation on CPU where vLLM prefers V2, and must not be `1` there: the V1 model runner runs;"
        " must not be `0` on CUDA, where V2 runs",
        False,
    ),
    Variable(
        STRICT,
        "`1`: a drafter or budget that fails ends the engine, as tests want it, and none has a time limit",
        True,
    ),
    Variable(MAX_BODY_MIB, "most MiB of a request's body to the routes under `/spec_rollout`, 1 to 64; unset: 1", True),
    Variable(
        DRAFTERS,
        "the folder below which `POST /spec_rollout/drafter` takes weights, absolute; unset: it takes none",
        True,
    ),
    Variable(
        KEY,
        "the key of an archive or a drafter behind tcp, or the path of a file with it, where no `key_file` is named",
        True,
    ),
    Variable(ENDS_WITH_PARENT, "`1`, set by a group: an engine's processes end with the one that began them", True),
    Variable(CACHE_HOME, "where `vllm-specrollout` keeps profiles and self-checks; unset: `~/.cache`", False),
    Variable("VLLM_PLUGINS", "if set, must list `spec_rollout`, or vLLM does not load this plugin", False),
    Variable("LD_PRELOAD", "which allocator and OpenMP the workers load; changes speed only", False),
)


def spec_rollout() -> str | None:
    """What `VLLM_SPEC_ROLLOUT` holds; an empty value counts as unset."""
    return os.environ.get(SPEC_ROLLOUT, "").strip() or None


def wants_spec_rollout() -> bool:
    """Whether the environment alone asks for speculation."""
    value = spec_rollout()
    return value is not None and value.lower() not in ("0", "false", "off", "no")


def is_strict() -> bool:
    """Whether failures of this plugin's own parts are raised rather than contained."""
    return os.environ.get(STRICT, "").strip().lower() in ("1", "true", "on", "yes")


def ends_with_parent() -> bool:
    """Whether processes that vLLM begins end with the one that began them, even if that is killed."""
    return os.environ.get(ENDS_WITH_PARENT) == "1"


def max_body_bytes() -> int:
    """Most bytes of a request's body to our routes.

    Raises:
        ConfigError: the variable holds no number of MiB from 1 to 64.
    """
    text = os.environ.get(MAX_BODY_MIB, "").strip() or "1"
    if not re.fullmatch("[0-9]{1,2}", text) or not 1 <= int(text) <= 64:
        raise ConfigError(
            f"`{MAX_BODY_MIB}` is {shown(text)}, outside 1 to 64", "give a whole number of MiB, or unset it"
        )
    return int(text) * MIB


def drafters_dir() -> str | None:
    """The folder below which drafters are taken over HTTP; it need not exist yet. None: they are not.

    Raises:
        ConfigError: the variable holds no absolute path.
    """
    text = os.environ.get(DRAFTERS, "").strip()
    if text and not os.path.isabs(text):
        raise ConfigError(f"`{DRAFTERS}` is {shown_path(text)}, not an absolute path", "give one, or unset it")
    return text or None


def cache_dir() -> Path:
    """The user's cache folder of this project, which need not exist; without a home, it lies among temporary files."""
    home = os.environ.get(CACHE_HOME, "").strip()
    try:
        return (Path(home) if home else Path.home() / ".cache") / "vllm-specrollout"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "vllm-specrollout"
