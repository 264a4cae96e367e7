"""The very tokens of stock vLLM on the V2 runner where a model takes more than text: with images, and with M-RoPE."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.cases import cases
from tests.e2e.identity.check import VOCAB, check_identity
from tests.e2e.identity.test_multimodal import drafted_trees, some_with_images
from tests.multimodal import seeing_model, turning_model
from tests.v2.test_identity import ENGINE, TREE

SOME = ("temperature 1", "greedy", "top_k and top_p", "logprobs")


@pytest.mark.nightly
def test_requests_with_images_and_without_draft_and_their_tokens_are_stocks(tmp_path: Path) -> None:
    path, image_token = seeing_model(tmp_path)
    requests = some_with_images(cases(6, VOCAB, seed=31, max_tokens=8, only=SOME), image_token)
    check_identity(path, "float32", requests, spec_rollout=TREE, inspect=drafted_trees, **ENGINE)


def test_positions_of_several_dimensions_follow_the_drafts_and_the_tokens_are_stocks(tmp_path: Path) -> None:
    requests = cases(6, VOCAB, seed=32, max_tokens=8, only=SOME)
    check_identity(turning_model(tmp_path), "float32", requests, spec_rollout=TREE, inspect=drafted_trees, **ENGINE)
