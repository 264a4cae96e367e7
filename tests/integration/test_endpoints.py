"""`vllm serve` with our routes, a key and a history: rewards are known by every id that a client was given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_specrollout.bench.policy import CHECKPOINT

from tests.integration.serving import JSON, ask, serve

pytestmark = pytest.mark.nightly

PROMPT = "17 + 45 - 8"
KEY = {"Authorization": "Bearer secret", **JSON}
ROUTES = {"/spec_rollout/rewards": {"rewards": []}, "/spec_rollout/epoch": {}, "/spec_rollout/history": None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    drafters = json.dumps({"drafters": ["history", "ngram"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "spec_rollout")
        flags = ("--spec-rollout", drafters, "--max-model-len", "256", "--api-key", "secret")
        with serve(str(CHECKPOINT), log, *flags) as address:
            yield address


def asked(server: str, path: str, body: Any = None) -> tuple[int, Any]:
    return ask(server, path, body, KEY)


def generate(server: str, path: str, **options: Any) -> Any:
    status, answer = asked(server, path, {"model": "tiny", "max_tokens": 8, "seed": 1, "temperature": 1.0, **options})
    assert status == 200, answer
    return answer


def completion(server: str, **options: Any) -> Any:
    return generate(server, "/v1/completions", **{"prompt": PROMPT, **options})


def chat(server: str, **options: Any) -> Any:
    return generate(server, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], **options)


def report(server: str, *rewards: tuple[str, int | None]) -> Any:
    entries = [{"request_id": name, "index": index, "reward": 0.5} for name, index in rewards]
    status, counts = asked(server, "/spec_rollout/rewards", {"rewards": entries})
    assert status == 200, counts
    return counts


@pytest.mark.parametrize("make", [completion, chat])
def test_an_answer_of_one_choice_is_known_by_its_id_with_and_without_an_index(server: str, make: Any) -> None:
    name = make(server)["id"]
    assert report(server, (name, None)) == {"matched": 1, "repeated": 0, "unknown": 0}
    assert report(server, (name, 0))["unknown"] == 0
    assert report(server, (name, 1)) == {"matched": 0, "repeated": 0, "unknown": 1}


@pytest.mark.parametrize("make", [completion, chat])
def test_each_of_several_choices_is_known_by_its_index(server: str, make: Any) -> None:
    name = make(server, n=3)["id"]
    assert report(server, *((name, index) for index in range(3))) == {"matched": 3, "repeated": 0, "unknown": 0}
    assert report(server, (name, None), (name, 3)) == {"matched": 0, "repeated": 0, "unknown": 2}


def test_each_of_several_prompts_is_known_by_the_index_of_its_choice(server: str) -> None:
    answer = completion(server, prompt=[PROMPT, "3 + 4"])
    rewards = [(answer["id"], choice["index"]) for choice in answer["choices"]]
    assert report(server, *rewards) == {"matched": 2, "repeated": 0, "unknown": 0}


def test_samples_of_several_prompts_are_known_by_their_prompts_name(server: str) -> None:
    name = completion(server, prompt=[PROMPT, "3 + 4"], n=2)["id"]
    rewards = [(f"{name}-{prompt}", sample) for prompt in range(2) for sample in range(2)]
    assert report(server, *rewards) == {"matched": 4, "repeated": 0, "unknown": 0}


def test_a_conversation_of_a_batch_and_a_response_are_known(server: str) -> None:
    conversation = [{"role": "user", "content": PROMPT}]
    batch = generate(server, "/v1/chat/completions/batch", messages=[conversation, conversation])
    assert report(server, (batch["id"], 0), (batch["id"], 1))["matched"] == 2
    status, response = asked(server, "/v1/responses", {"model": "tiny", "input": PROMPT, "max_output_tokens": 8})
    assert status == 200
    assert report(server, (response["id"], None))["matched"] == 1


def test_a_request_that_the_client_names_is_known_by_the_name_in_its_answer(server: str) -> None:
    body = {"model": "tiny", "max_tokens": 8, "prompt": PROMPT}
    _, answer = ask(server, "/v1/completions", body, {**KEY, "X-Request-Id": "rollout-7"})
    assert answer["id"] == "cmpl-rollout-7"
    assert report(server, ("cmpl-rollout-7", None))["matched"] == 1


def test_epochs_go_on_and_the_history_tells_of_them(server: str) -> None:
    _, before = asked(server, "/spec_rollout/history")
    present = before["total"]["store"]["epoch"]
    assert before["total"]["lookups"] > 0 and len(before["engines"]) == 1
    assert asked(server, "/spec_rollout/epoch", {}) == (200, {"epoch": present + 1})
    status, answer = asked(server, "/spec_rollout/epoch", {"epoch": present})
    assert status == 409 and f"below the present epoch {present + 1}" in answer["error"]["message"]
    # to name the present one begins nothing, and one far ahead is no epoch
    assert asked(server, "/spec_rollout/epoch", {"epoch": present + 1}) == (200, {"epoch": present + 1})
    assert asked(server, "/spec_rollout/epoch", {"epoch": 2**31 - 1})[0] == 409
    assert asked(server, "/spec_rollout/history")[1]["total"]["store"]["epoch"] == present + 1


@pytest.mark.parametrize("headers", [JSON, {**JSON, "Authorization": "Bearer wrong"}], ids=["none", "wrong"])
@pytest.mark.parametrize("path, body", ROUTES.items())
def test_without_the_key_our_routes_answer_as_vllms_own_do(server: str, path: str, body: Any, headers: Any) -> None:
    assert ask(server, path, body, headers) == ask(server, "/v1/models", None, headers)
    assert asked(server, path, body)[0] == 200
