"""Random models small enough for interpreted kernels."""

from __future__ import annotations

from pathlib import Path


def small_model(folder: Path, arch: str, dtype: str) -> str:
    """Two layers of a random model, made once per folder."""
    from bench.policy.random_model import make_random_model

    path = folder / f"{arch}-{dtype}"
    if not path.exists():
        make_random_model(path, arch=arch, size="1M", num_layers=2, dtype=dtype, seed=7)
    return str(path)
