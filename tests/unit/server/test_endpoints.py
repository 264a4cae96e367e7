import json

import pytest
from fastapi.testclient import TestClient
from starlette.datastructures import Headers

from tests.unit.server.conftest import JSON, WITH_MODEL, FakeEngine, ask, report, reward
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.server import endpoints


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


def test_epochs_begin_one_after_another_or_by_name(client):
    begin = [client.post("/spec_rollout/epoch", json=body).json() for body in ({}, {"epoch": None}, {"epoch": 9})]
    assert begin == [{"epoch": 1}, {"epoch": 2}, {"epoch": 9}]


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
    store = {"epoch": 0, "lowest": 0, "answers": 0, "memory_bytes": 1024}
    kept = {"store": store, "hits": 1, "lookups": 4, "hit_rate": 0.25}
    assert client.get("/spec_rollout/history").json() == {"total": kept, "engines": [kept]}


def test_a_drafter_is_given_other_weights(make_app):
    engine = FakeEngine(settings=WITH_MODEL)
    client = TestClient(make_app(engine))
    answers = [client.post("/spec_rollout/drafter", json={"path": f"/drafters/heads/{n}"}).json() for n in (3, 4)]
    assert answers == [{"version": 1}, {"version": 2}] and engine.drafters == ["/drafters/heads/3", "/drafters/heads/4"]


@pytest.mark.parametrize(
    "path, status, kind, message",
    [
        ("/drafters/none", 409, "Conflict", "`/drafters/none` holds no safetensors\n\nhint: give a folder"),
        ("/heads/3", 403, "Forbidden", "`/heads/3` leads out\n\nhint: give a path below"),
    ],
    ids=["unusable", "from elsewhere"],
)
def test_weights_that_are_not_taken_are_refused_with_the_way_out(make_app, path, status, kind, message):
    engine = FakeEngine(settings=WITH_MODEL)
    answer = TestClient(make_app(engine)).post("/spec_rollout/drafter", json={"path": path})
    assert answer.status_code == status and not engine.drafters and not engine.loading
    error = answer.json()["error"]
    assert (error["type"], error["message"]) == (kind, message)


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
    hint = 'hint: start it with --spec-rollout \'{"drafters": ["history", "ngram"]}\''
    for answer in (
        report(client, reward("a")),
        client.post("/spec_rollout/epoch", json={}),
        client.get("/spec_rollout/history"),
    ):
        assert answer.status_code == 409 and hint in answer.json()["error"]["message"]


def test_a_server_without_an_engine_says_so(make_app):
    answer = TestClient(make_app(None)).get("/spec_rollout/history")
    assert answer.status_code == 409 and "this server has no engine" in answer.text


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
    answers = [client.get(path) for path in ("/spec_rollout/history", "/v1/models")]
    ours, vllms = ((answer.status_code, answer.content, Headers(answer.headers)) for answer in answers)
    assert ours == vllms


# --- description -----------------------------------------------------------------------------------------------------


def test_the_description_names_every_answer_and_the_key_where_there_is_one(make_app, engine):
    for keys in (None, ["secret"]):
        document, posted = make_app(engine, keys).openapi(), {"200", "400", "401", "409", "413", "422"}
        told = {path: set(one["responses"]) for path, own in document["paths"].items() for one in own.values()}
        assert told["/spec_rollout/rewards"] == told["/spec_rollout/epoch"] == posted
        assert told["/spec_rollout/drafter"] == posted | {"403"}
        assert told["/spec_rollout/history"] == {"200", "401", "409"}
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
