"""vLLM's files that were edited on this host after they were installed, as some trainers do."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from collections.abc import Sequence
from importlib.metadata import PackagePath

from vllm_specrollout.patches.supported import DISTRIBUTIONS

EDITORS = {
    "NeMo-RL": (
        "ray_executor.py",
        "ray_executor_v2.py",
        "llama_eagle3.py",
        "tool_parsers/utils.py",
        "shm_broadcast.py",
        "radio.py",
    ),
}
"""Trainers that are known to edit vLLM, and the ends of the files' names (read in its commit 7ea279a)."""


def edited_files() -> list[str]:
    """vLLM's Python files whose content is not what the installed wheel brought; it reads some 30 MB.

    Empty where vLLM was not installed from a wheel that says what it brings.
    """
    found: dict[str, bool] = {}
    for name in DISTRIBUTIONS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.parts[0] == "vllm" and file.suffix == ".py" and file.hash is not None:
                found[str(file)] = not _is_as_installed(file)
    return sorted(file for file, is_edited in found.items() if is_edited)


def editor_of(files: Sequence[str]) -> str | None:
    """Who is known to edit all of these; None: nobody, or there are none."""
    for editor, ends in EDITORS.items():
        if files and all(any(f"/{file}".endswith(f"/{end}") for end in ends) for file in files):
            return editor
    return None


def _is_as_installed(file: PackagePath) -> bool:
    assert file.hash is not None
    try:
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
    except (OSError, ValueError):
        return False  # it is gone, or nobody can tell
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value
