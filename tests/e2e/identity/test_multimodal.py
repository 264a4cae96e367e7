"""The very tokens of stock vLLM where a model takes more than text: with images and without, and with M-RoPE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import Case, cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.engines import Engine
from tests.multimodal import picture, seeing_model, turning_model

ENGINE = {"max_num_seqs": 16, "max_model_len": 256}


def some_with_images(requests: list[Case], image_token: int) -> list[Case]:
    """Every other request looks at a picture of its own, in the middle of its prompt."""
    return [
        replace(one, prompt=[*one.prompt[:3], image_token, *one.prompt[3:]], image=picture(i)) if i % 2 else one
        for i, one in enumerate(requests)
    ]


def drafted_trees(ours: Engine) -> None:
    assert ours.runner.shape[0].value == "tree", ours.runner.shape
    assert ours.runner.stats.branches_committed > 0


@pytest.mark.nightly
def test_requests_with_images_and_without_draft_and_their_tokens_are_stocks(tmp_path: Path) -> None:
    path, image_token = seeing_model(tmp_path)
    requests = some_with_images(cases(24, VOCAB, seed=31, max_tokens=24), image_token)
    check_identity(path, "float32", requests, inspect=drafted_trees, **ENGINE)


def test_positions_of_several_dimensions_follow_the_drafts_and_the_tokens_are_stocks(tmp_path: Path) -> None:
    requests = cases(24, VOCAB, seed=32, max_tokens=24)
    check_identity(turning_model(tmp_path), "float32", requests, inspect=drafted_trees, **ENGINE)
