import sys
import threading
import tracemalloc

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.conftest import JSON, ask, report
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server import endpoints, reports
from vllm_specrollout.server.endpoints import BodyError, decode
from vllm_specrollout.server.reports import MAX_REWARDS

MAX_BODY_BYTES = 1 << 20


@pytest.mark.parametrize(
    "body, status, message",
    [
        ("", 422, "the body is missing"),
        ("{", 400, "the body is not JSON: Input data was truncated"),
        ("[" * 60_000, 422, "`body` cannot be used: expected `object`, got `array`"),
        ("\xff", 400, "the body is not JSON: invalid character (byte 0)"),
        ('{"rewards": [], "seed": 1}', 422, "unknown key `seed`"),
        ("{}", 422, "`rewards` is missing"),
        ('{"rewards": {}}', 422, "`rewards` cannot be used: expected `array`, got `object`"),
        ('{"rewards": [{"reward": 1}]}', 422, "`rewards[0].request_id` is missing"),
        ('{"rewards": [{"request_id": "a"}, {}]}', 422, "`rewards[0].reward` is missing"),
        ('{"rewards": [{"request_id": "a", "reward": 1, "score": 1}]}', 422, "unknown key `rewards[0].score`"),
    ],
)
def test_a_body_of_the_wrong_form_is_one_clear_error(client, body, status, message):
    answer = client.post("/spec_rollout/rewards", content=body.encode("latin-1"), headers=JSON)
    assert answer.status_code == status
    cause, _, hint = answer.json()["error"]["message"].partition("\n\nhint: ")
    assert cause == message and hint


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("reward", "1e999", "number out of range"),
        ("reward", "1" + "0" * 400, "number out of range"),
        ("reward", '"1"', "expected `float`, got `str`"),
        ("reward", "true", "expected `float`, got `bool`"),
        ("request_id", "7", "expected `str`, got `int`"),
        ("request_id", '""', "expected `str` of length >= 1"),
        ("request_id", f'"{"a" * 257}"', "expected `str` of length <= 256"),
        ("index", "-1", "expected `float` >= 0.0"),
        ("index", "65536", "expected `float` <= 65535.0"),
        ("index", "1.5", "expected `float` that's a multiple of 1.0"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_clear_error(client, engine, field, value, message):
    entry = {"request_id": '"chatcmpl-a"', "reward": "1", field: value}
    body = ", ".join(f'"{key}": {text}' for key, text in entry.items())
    answer = client.post("/spec_rollout/rewards", content='{"rewards": [{' + body + "}]}", headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == 422
    assert error["message"].startswith(f"`rewards[0].{field}` cannot be used: {message}\n\nhint: give ")
    assert error["param"] == f"rewards[0].{field}" and engine.rewards == {}


def test_a_report_holds_at_most_65536_rewards(make_app, engine, monkeypatch):
    monkeypatch.setenv("SPECROLLOUT_MAX_BODY_MIB", "8")
    client = TestClient(make_app(engine))
    most = [{"request_id": "a", "reward": 1} for _ in range(65_536)]
    assert report(client, *most).json()["unknown"] == 65_536
    answer = report(client, *most, most[0])
    assert answer.status_code == 422 and "the limit is 65536" in answer.text or "of length <= 65536" in answer.text
    assert max(engine.reports) == reports.REWARDS_AT_ONCE and sum(engine.reports) == 65_536


def test_a_body_without_a_json_content_type_is_refused(client):
    answer = client.post("/spec_rollout/rewards", content='{"rewards": []}', headers={"content-type": "text/plain"})
    assert answer.status_code == 422 and "Content-Type: application/json" in answer.text


def test_a_body_of_one_mebibyte_is_read_and_one_byte_more_is_not(client):
    body = b'{"rewards": []}'
    most = body + b" " * (MAX_BODY_BYTES - len(body))
    assert client.post("/spec_rollout/rewards", content=most, headers=JSON).status_code == 200
    answer = client.post("/spec_rollout/rewards", content=most + b" ", headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == (
        "the body has 1048577 bytes or more; the limit is 1048576\n\n"
        "hint: split the rewards over several requests, or raise SPECROLLOUT_MAX_BODY_MIB"
    )


def test_the_limit_can_be_raised(make_app, engine, monkeypatch):
    monkeypatch.setenv("SPECROLLOUT_MAX_BODY_MIB", "2")
    client = TestClient(make_app(engine))
    sizes = (2 << 20, (2 << 20) + 1)
    answers = [client.post("/spec_rollout/rewards", content=b"{}" + b" " * (n - 2), headers=JSON) for n in sizes]
    assert [answer.status_code for answer in answers] == [422, 413]


@pytest.mark.parametrize("value", ["0", "65", "-1", "1.5", "1e3", "one", "9" * 5000])
def test_a_limit_that_cannot_be_used_ends_the_start(make_app, engine, monkeypatch, value):
    monkeypatch.setenv("SPECROLLOUT_MAX_BODY_MIB", value)
    with pytest.raises(ConfigError, match="outside 1 to 64\n\nhint: "):
        make_app(engine)


def of_one_mebibyte(start, entry, end, most=1 << 30):
    """As many entries as fit."""
    entries, size = [], len(start) + len(end)
    for i in range(most):
        text = entry(i)
        if size + len(text) + 1 > MAX_BODY_BYTES:
            break
        entries.append(text)
        size += len(text) + 1
    return (start + ",".join(entries) + end).encode()


WRONG = ",".join(f'"{letter}":1' for letter in "abcdefghijklmnopq")
WORST = {
    "unknown keys": of_one_mebibyte('{"rewards":[],', lambda i: f'"{i:x}":0', "}"),
    "some unknown keys": of_one_mebibyte('{"rewards":[],', lambda i: f'"{i:x}":0', "}", most=16_000),
    "rewards of unknown keys": of_one_mebibyte('{"rewards":[', lambda i: "{" + WRONG + "}", "]}"),
    "empty rewards": of_one_mebibyte('{"rewards":[', lambda i: "{}", "]}", most=MAX_REWARDS),
    "too many objects": of_one_mebibyte('{"rewards":[', lambda i: '{"":0}', "]}"),
    "wrong rewards": of_one_mebibyte('{"rewards":[', lambda i: '{"request_id":0,"reward":""}', "]}"),
    "long ids": of_one_mebibyte('{"rewards":[', lambda i: '{"request_id":"' + "x" * 300 + '","reward":1}', "]}"),
}


@pytest.mark.parametrize("name", WORST)
def test_of_a_body_full_of_mistakes_the_first_alone_is_looked_for(name):
    tracemalloc.start()
    try:
        with pytest.raises(BodyError) as refusal:
            decode(WORST[name], endpoints.SpecRolloutRewards)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(refusal.value.cause) < 250 and peak < 1 << 16


def test_a_list_beyond_all_reports_is_refused_undecoded(monkeypatch):
    monkeypatch.setattr(endpoints.msgspec.json, "decode", None)
    with pytest.raises(BodyError, match="objects and lists"):
        decode(WORST["too many objects"], endpoints.SpecRolloutRewards)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_only_python_writes_is_refused_with_the_hint_of_rewards(client, number):
    body = f'{{"rewards": [{{"request_id": "a", "reward": {number}}}]}}'
    answer = client.post("/spec_rollout/rewards", content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith("the body holds NaN or infinity, at byte 4")
    assert "hint: give a finite number" in answer.json()["error"]["message"]


def test_a_full_report_is_read_whatever_its_ids_are(client):
    body = of_one_mebibyte('{"rewards":[', lambda i: f'{{"request_id":"run:3:7:{{{i}}}","reward":1}}', "]}")
    assert client.post("/spec_rollout/rewards", content=body, headers=JSON).status_code == 200


def test_whoever_decodes_a_report_lets_others_run_at_every_reward():
    """A decoder of C holds Python's lock until it is done, but for calls of Python code."""
    calls = []
    own = endpoints.SpecRolloutReward.__post_init__.__code__
    sys.setprofile(lambda frame, event, arg: calls.append(event) if frame.f_code is own and event == "call" else None)
    body = of_one_mebibyte('{"rewards":[', lambda i: '{"request_id":"a","reward":1}', "]}", most=500)
    try:
        decode(body, endpoints.SpecRolloutRewards)
    finally:
        sys.setprofile(None)
    assert len(calls) == 500


@pytest.mark.parametrize("content", [b'{"rewards": []}', b'{"rewards": [{}]}', b'{"rewards": [0', b'{"seed": 1}'])
def test_a_body_is_decoded_on_a_thread_of_its_own(client, monkeypatch, content):
    threads = []

    def spy(body, kind):
        threads.append(threading.current_thread().name)
        return decode(body, kind)

    monkeypatch.setattr(endpoints, "decode", spy)
    assert client.post("/spec_rollout/rewards", content=content, headers=JSON).status_code in (200, 400, 422)
    assert len(threads) == 1 and threads[0].startswith("specrollout-http")


@pytest.mark.parametrize(
    "header, parts",
    [
        ((b"transfer-encoding", b"chunked"), 2),
        ((b"content-length", b"2"), 2),
        ((b"content-length", b"1048577"), 0),
        ((b"content-length", b"9" * 4_400), 0),
    ],
    ids=["in chunks", "longer than announced", "announced as too large", "as far too large"],
)
def test_a_body_is_read_no_further_than_the_limit_and_not_at_all_where_it_says_so(make_app, engine, header, parts):
    assert ask(make_app(engine), [header], [b" " * (1 << 20)] * 64) == (413, parts)


@pytest.mark.parametrize("name", [*WORST, "valid"])
def test_the_worst_body_of_one_mebibyte_takes_a_few_times_its_size(client, name):
    valid = of_one_mebibyte('{"rewards":[', lambda i: f'{{"request_id":"chatcmpl-{i:030d}","reward":1.0}}', "]}")
    body = WORST.get(name, valid)
    # what is made once is no growth
    client.post("/spec_rollout/rewards", content=body[:1024], headers=JSON)
    tracemalloc.start()
    try:
        status = client.post("/spec_rollout/rewards", content=body, headers=JSON).status_code
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert status == (200 if name == "valid" else 422)
    assert peak < 16 << 20 and left < 2 << 20
