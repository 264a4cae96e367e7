"""Our routes in an app of their own: what they answer, what they refuse, and who may ask."""

import asyncio
import json
import sys
import threading
import tracemalloc

import pytest
from fastapi.testclient import TestClient
from starlette.datastructures import Headers

from tests.unit.server.conftest import HISTORY, WITH_MODEL, FakeEngine
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server import endpoints, reports
from vllm_specrollout.server.endpoints import BodyError, decode
from vllm_specrollout.server.reports import MAX_REWARDS

MAX_BODY_BYTES = 1 << 20

JSON = {"content-type": "application/json"}


@pytest.fixture
def engine():
    return FakeEngine({"chatcmpl-a", "0_chatcmpl-b", "1_chatcmpl-b", "cmpl-c-0"}, HISTORY)


@pytest.fixture
def client(make_app, engine):
    return TestClient(make_app(engine))


def reward(request_id, value=1.0, **more):
    return {"request_id": request_id, "reward": value, **more}


def report(client, *rewards, **options):
    return client.post("/spec_rollout/rewards", json={"rewards": rewards}, **options)


def test_rewards_reach_their_answers_and_unknown_ids_are_counted(client, engine):
    answer = report(
        client,
        reward("chatcmpl-a", 0.5),
        reward("chatcmpl-b", 1, index=1),
        reward("cmpl-c", -1.0, index=0),
        reward("chatcmpl-b", index=7),
        reward("nobody", index=None),
    )
    assert answer.status_code == 200
    assert answer.json() == {"matched": 3, "repeated": 0, "unknown": 2}
    assert engine.rewards == {"chatcmpl-a": 0.5, "1_chatcmpl-b": 1.0, "cmpl-c-0": -1.0}


def test_a_repeated_reward_is_counted_and_replaces_the_first(client, engine):
    answer = report(client, reward("chatcmpl-a", 0.5), reward("chatcmpl-a", 0.25))
    assert answer.json() == {"matched": 1, "repeated": 1, "unknown": 0}
    assert engine.rewards == {"chatcmpl-a": 0.25}


def test_epochs_begin_one_after_another_or_by_name(client):
    begin = [client.post("/spec_rollout/epoch", json=body).json() for body in ({}, {"epoch": None}, {"epoch": 9})]
    assert begin == [{"epoch": 1}, {"epoch": 2}, {"epoch": 9}]


def test_an_epoch_named_twice_begins_once(client, engine):
    engine.epoch = 5
    answers = [client.post("/spec_rollout/epoch", json={"epoch": 6}) for _ in range(3)]
    assert [answer.json() for answer in answers] == [{"epoch": 6}] * 3 and engine.epoch == 6


@pytest.mark.parametrize("epoch, status", [(1_000_005, 200), (1_000_006, 409), (2**31 - 1, 409), (2**31, 422)])
def test_an_epoch_far_ahead_is_refused_and_changes_nothing(client, engine, epoch, status):
    engine.epoch = 5
    assert client.post("/spec_rollout/epoch", json={"epoch": epoch}).status_code == status
    assert engine.epoch == (epoch if status == 200 else 5)


def test_an_epoch_that_falls_is_a_conflict_and_changes_nothing(client, engine):
    engine.epoch = 5
    answer = client.post("/spec_rollout/epoch", json={"epoch": 4})
    assert answer.status_code == 409
    assert answer.json()["error"] == {
        "message": "`epoch` is 4, below the present epoch 5\n\nhint: name 5 or a later epoch, or none to begin epoch 6",
        "type": "Conflict",
        "param": None,
        "code": 409,
    }
    assert engine.epoch == 5


def test_the_history_is_listed_and_summed(client):
    kept = {
        "store": {"epoch": 0, "lowest": 0, "answers": 0, "memory_bytes": 1024},
        "hits": 1,
        "lookups": 4,
        "hit_rate": 0.25,
    }
    assert client.get("/spec_rollout/history").json() == {"total": kept, "engines": [kept]}


def test_a_drafter_is_given_other_weights(make_app):
    engine = FakeEngine(settings=WITH_MODEL)
    client = TestClient(make_app(engine))
    answers = [client.post("/spec_rollout/drafter", json={"path": f"/drafters/heads/{n}"}).json() for n in (3, 4)]
    assert answers == [{"version": 1}, {"version": 2}] and engine.drafters == ["/drafters/heads/3", "/drafters/heads/4"]


def test_weights_that_cannot_be_used_are_refused_with_the_way_out(make_app):
    client = TestClient(make_app(FakeEngine(settings=WITH_MODEL)))
    answer = client.post("/spec_rollout/drafter", json={"path": "/drafters/none"})
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "`/drafters/none` holds no safetensors\n\nhint: give a folder"


def test_weights_from_elsewhere_are_forbidden(make_app):
    engine = FakeEngine(settings=WITH_MODEL)
    answer = TestClient(make_app(engine)).post("/spec_rollout/drafter", json={"path": "/heads/3"})
    assert (
        answer.status_code == 403
        and answer.json()["error"]["type"] == "Forbidden"
        and not engine.drafters
        and not engine.loading
    )
    assert answer.json()["error"]["message"] == "`/heads/3` leads out\n\nhint: give a path below"


@pytest.mark.parametrize("named", [None, "", " "])
def test_a_server_that_names_no_folder_takes_no_weights(make_app, monkeypatch, named):
    monkeypatch.delenv("SPECROLLOUT_DRAFTERS")
    if named is not None:
        monkeypatch.setenv("SPECROLLOUT_DRAFTERS", named)
    engine = FakeEngine(settings=WITH_MODEL)
    answer = TestClient(make_app(engine)).post("/spec_rollout/drafter", json={"path": "/drafters/heads/3"})
    assert answer.status_code == 403 and not engine.drafters and not engine.loading
    assert answer.json()["error"]["message"] == (
        "this server takes no drafters over HTTP\n\n"
        "hint: start it with SPECROLLOUT_DRAFTERS=DIR; whatever lies below DIR may then be loaded"
    )


def test_a_folder_that_is_not_absolute_ends_the_start(make_app, engine, monkeypatch):
    monkeypatch.setenv("SPECROLLOUT_DRAFTERS", "heads")
    with pytest.raises(ConfigError, match="`SPECROLLOUT_DRAFTERS` is 'heads', not an absolute path\n\nhint: "):
        make_app(engine)


def test_an_engine_in_which_no_model_drafts_takes_no_weights(client):
    answer = client.post("/spec_rollout/drafter", json={"path": "/heads/3"})
    assert answer.status_code == 409
    assert answer.json()["error"]["message"].startswith("no model drafts in this engine\n\nhint: start it with")


def test_a_whole_number_may_be_written_with_a_point(client, engine):
    assert report(client, reward("chatcmpl-b", index=1.0)).json()["matched"] == 1
    assert client.post("/spec_rollout/epoch", json={"epoch": 3.0}).json() == {"epoch": 3}


@pytest.mark.parametrize("settings", [None, {"drafters": ["ngram"]}], ids=["off", "no history"])
def test_an_engine_without_history_is_a_conflict_with_a_way_out(make_app, settings):
    client = TestClient(make_app(FakeEngine(settings=settings)))
    for answer in (
        report(client, reward("a")),
        client.post("/spec_rollout/epoch", json={}),
        client.get("/spec_rollout/history"),
    ):
        assert answer.status_code == 409
        assert 'hint: start it with --spec-rollout \'{"drafters": ["history", "ngram"]}\'' in answer.text.replace(
            "\\", ""
        )


def test_a_server_without_an_engine_says_so(make_app):
    answer = TestClient(make_app(None)).get("/spec_rollout/history")
    assert answer.status_code == 409 and "this server has no engine" in answer.text


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
        (
            '{"rewards": [{"request_id": "a", "reward": 1, "score": 1}]}',
            422,
            "unknown key `rewards[0].score`",
        ),
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


# --- size ------------------------------------------------------------------------------------------------------------


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
    try:
        decode(
            of_one_mebibyte('{"rewards":[', lambda i: '{"request_id":"a","reward":1}', "]}", most=500),
            endpoints.SpecRolloutRewards,
        )
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


def ask(app, headers, chunks):
    """Drive an app by hand; returns its status and how many parts of the body it took."""
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": chunks[taken - 1], "more_body": taken < len(chunks)}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/spec_rollout/rewards",
        "headers": [(b"content-type", b"application/json"), *headers],
        "query_string": b"",
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], taken


def test_a_body_in_chunks_is_read_no_further_than_the_limit(make_app, engine):
    chunks = [b" " * (1 << 20)] * 64
    assert ask(make_app(engine), [(b"transfer-encoding", b"chunked")], chunks) == (413, 2)


@pytest.mark.parametrize("length", [b"1048577", b"9" * 4_400])
def test_a_body_announced_as_too_large_is_not_read_at_all(make_app, engine, length):
    assert ask(make_app(engine), [(b"content-length", length)], [b" "] * 2) == (413, 0)


def test_a_body_that_is_longer_than_announced_is_still_limited(make_app, engine):
    assert ask(make_app(engine), [(b"content-length", b"2")], [b" " * (1 << 20)] * 64) == (413, 2)


def test_a_recording_that_grows_while_it_is_sent_comes_as_long_as_was_announced(make_app, tmp_path, monkeypatch):
    path = tmp_path / "a ü.jsonl"
    path.write_bytes(b"0123456789" * 300_000)
    beginning = endpoints._beginning

    def growing(path, size):
        for part in beginning(path, size):
            with path.open("ab") as file:
                file.write(b"more")
            yield part

    monkeypatch.setattr(endpoints, "_beginning", growing)
    client = TestClient(make_app(FakeEngine(set(), {"drafters": ["ngram"], "record": str(path)})))
    before = path.read_bytes()
    answer = client.get("/spec_rollout/rollout")
    assert answer.content == before and answer.headers["content-length"] == str(len(before))
    assert answer.headers["content-disposition"].endswith("a%20%C3%BC.jsonl")
    assert path.stat().st_size > len(before)


# --- key -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer ", "Bearer secretx", "secret", "Basic secret", "Bearer secret secret"]
)
def test_without_the_servers_key_every_route_answers_401(make_app, engine, header):
    client = TestClient(make_app(engine, ["secret"]), headers={} if header is None else {"Authorization": header})
    routes = [(method, endpoints.PREFIX + path) for method, path, *_ in endpoints._ROUTES]
    assert ("GET", "/spec_rollout/rollout") in routes and len(routes) == 6
    for answer in (
        report(client, reward("chatcmpl-a")),
        client.post("/spec_rollout/rewards", content="{", headers=JSON),
        *(client.request(method, path, json={}) for method, path in routes),
    ):
        assert answer.status_code == 401 and answer.json() == {"error": "Unauthorized"}
    assert engine.rewards == {} and engine.epoch == 0


def test_any_of_the_servers_keys_opens_every_route(make_app, engine):
    app = make_app(engine, ["one", "two"])
    for key in ("Bearer one", "bearer two"):
        client = TestClient(app, headers={"Authorization": key})
        assert report(client).status_code == client.get("/spec_rollout/history").status_code == 200
        assert client.post("/spec_rollout/epoch", json={}).status_code == 200


def test_a_key_from_the_environment_counts_and_one_from_the_command_line_outranks_it(make_app, engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    header = {"Authorization": "Bearer of-the-environment"}
    assert TestClient(make_app(engine)).get("/spec_rollout/history").status_code == 401
    assert TestClient(make_app(engine), headers=header).get("/spec_rollout/history").status_code == 200
    assert TestClient(make_app(engine, ["x"]), headers=header).get("/spec_rollout/history").status_code == 401


def test_a_request_without_the_key_is_refused_before_its_body_is_read(make_app, engine):
    assert ask(make_app(engine, ["secret"]), [], [b" "] * 3) == (401, 0)


def test_our_answer_to_a_missing_key_is_that_of_vllms_own_routes(make_app, engine):
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app = make_app(engine, ["secret"])
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    client = TestClient(app)
    ours, vllms = client.get("/spec_rollout/history"), client.get("/v1/models")
    assert (ours.status_code, ours.content, Headers(ours.headers)) == (
        vllms.status_code,
        vllms.content,
        Headers(vllms.headers),
    )


# --- description -----------------------------------------------------------------------------------------------------


def test_the_description_names_every_answer_and_the_key_where_there_is_one(make_app, engine):
    for keys in (None, ["secret"]):
        document = make_app(engine, keys).openapi()
        paths = document["paths"]
        assert set(paths["/spec_rollout/rewards"]["post"]["responses"]) == {"200", "400", "401", "409", "413", "422"}
        forbids = set(paths["/spec_rollout/drafter"]["post"]["responses"])
        assert forbids == {"200", "400", "401", "403", "409", "413", "422"}
        assert set(paths["/spec_rollout/epoch"]["post"]["responses"]) == {"200", "400", "401", "409", "413", "422"}
        assert set(paths["/spec_rollout/history"]["get"]["responses"]) == {"200", "401", "409"}
        assert ("securitySchemes" in document.get("components", {})) == bool(keys)
        assert "HTTPValidationError" not in json.dumps(document)


def test_a_history_that_is_given_up_is_a_conflict_and_says_why(client, engine):
    engine.given_up = "the history drafter failed 5 times and is given up"
    answers = [
        report(client, reward("chatcmpl-a")),
        client.post("/spec_rollout/epoch", json={}),
        client.post("/spec_rollout/epoch", json={"epoch": 3}),
        client.get("/spec_rollout/history"),
    ]
    assert [answer.status_code for answer in answers] == [409] * 4
    assert all("failed 5 times" in answer.json()["error"]["message"] for answer in answers)


def test_how_drafters_are_can_be_read(client, engine):
    (found,) = client.get("/spec_rollout/drafters").json()["engines"]
    assert found["drafters"]["history"]["state"] == found["budget"]["state"] == "alive"
    engine.given_up = "no space left"
    (found,) = client.get("/spec_rollout/drafters").json()["engines"]
    assert found["drafters"]["history"] == {"state": "given up", "failed": 5, "error": "no space left", "steps": 0}


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
