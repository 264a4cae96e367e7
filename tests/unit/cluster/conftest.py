"""Groups of engines without a model: their models' names are nobody's, and their arguments none of vLLM's."""

from collections.abc import Iterator

import pytest

from vllm_specrollout.config import arguments


@pytest.fixture(scope="module", autouse=True)
def _nameless() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "known_arguments", frozenset)
        patch.setattr(arguments, "_problem_at_hub", lambda model: None)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        yield
