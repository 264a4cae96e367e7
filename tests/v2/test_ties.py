"""What is called a tie is one, with the noise of the V2 runner."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.identity.test_ties import check_gaps
from tests.v2.models import small_model


def test_a_bias_of_the_distance_found_makes_stock_take_the_other_token(tmp_path: Path) -> None:
    check_gaps(small_model(tmp_path, "qwen3", "float32"), max_num_seqs=4, max_model_len=320)
