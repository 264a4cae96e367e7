"""What users have given, or might give, in the place of a configuration or of a request's options.

Each is refused in one clear message, or rightly accepted: the recorded texts `refusals/bad_*.txt` say which. Nothing
else than the project's own errors may come of any of them.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from vllm_specrollout.config import RequestOptions, SpecRolloutConfig, parse, parse_request
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.config.places import check_places
from vllm_specrollout.errors import ConfigError

HERE = Path(__file__).parent
NAN, INF = float("nan"), float("inf")
MOST_CHARACTERS = 600
"""Of a message, whatever was given."""

ENGINE = {
    "a typo": {"max_draft_token": 8},
    "a typo inside": {"history": {"epoch": 3}},
    "a key nothing resembles": {"zzz": 1},
    "a key that is no text": {1: 2},
    "a number as text": {"max_draft_tokens": "8"},
    "a fraction": {"max_draft_tokens": 8.0},
    "below zero": {"max_draft_tokens": -1},
    "zero": {"max_draft_tokens": 0},
    "thirty digits": {"max_draft_tokens": 10**30},
    "a bool for a number": {"max_draft_tokens": True},
    "not a number": {"max_draft_tokens": NAN},
    "null for a number": {"max_draft_tokens": None},
    "deeper than it has nodes": {"max_draft_tokens": 4, "max_depth": 16},
    "drafters: text": {"drafters": "ngram"},
    "drafters: none": {"drafters": []},
    "drafters: one twice": {"drafters": ["ngram", "ngram"]},
    "drafters: a typo": {"drafters": ["ngrma"]},
    "drafters: a number": {"drafters": [1]},
    "drafters: a list in it": {"drafters": [["ngram"]]},
    "drafters: an object": {"drafters": {"ngram": 1}},
    "drafters: an object in it": {"drafters": [{"a": 1}]},
    "drafters: null in it": {"drafters": [None]},
    "shape: a typo": {"shape": "trees"},
    "shape: upper case": {"shape": "TREE"},
    "shape: a list": {"shape": []},
    "budget: a typo": {"budget": "atuo"},
    "budget: a list": {"budget": ["auto"]},
    "queue_order: none such": {"queue_order": "longest"},
    "profile: a bool": {"profile": True},
    "record: empty": {"record": ""},
    "record: a folder's name": {"record": "TMP/"},
    "record: in a folder that is not there": {"record": "TMP/none/x.zst"},
    "record: a folder": {"record": "TMP"},
    "record: NUL": {"record": "a\0b"},
    "record: a number": {"record": 3},
    "ngram: a list": {"ngram": [1]},
    "ngram: null": {"ngram": None},
    "ngram: shortest above longest": {"ngram": {"min_match": 9, "max_match": 8}},
    "ngram: set and not on": {"drafters": ["history"], "ngram": {"max_match": 4}},
    "dir: a number": {"history": {"dir": 3}},
    "dir: a file": {"history": {"dir": "TMP/file"}},
    "dir: nowhere to be made": {"history": {"dir": "/proc/x"}},
    "dir: NUL": {"history": {"dir": "a\0b"}},
    "dir: of the user": {"history": {"dir": "~/hist"}},
    "dir: relative": {"history": {"dir": "hist"}},
    "dir: blanks": {"history": {"dir": "   "}},
    "dir: null": {"history": {"dir": None}},
    "decay: not a number": {"history": {"decay": NAN}},
    "decay: infinite": {"history": {"decay": INF}},
    "decay: below zero": {"history": {"decay": -0.1}},
    "decay: text": {"history": {"decay": "0.5"}},
    "decay: a bool": {"history": {"decay": True}},
    "reward_weight: huge": {"history": {"reward_weight": 1e300}},
    "reward_weight: 400 digits": {"history": {"reward_weight": 10**400}},
    "max_mib: none": {"history": {"max_mib": 0}},
    "max_mib: 4 TiB": {"history": {"max_mib": 1 << 22}},
    "epochs: below zero": {"history": {"epochs": -1}},
    "siblings: text": {"history": {"siblings": "no"}},
    "siblings: a number": {"history": {"siblings": 1}},
    "no answer may draft": {"history": {"epochs": 0, "siblings": False}},
    "history: set and not on": {"drafters": ["ngram"], "history": {"dir": "TMP/h"}},
    "text: empty": "",
    "text: blanks": "  ",
    "text: garbage": "yess",
    "text: a list": '["ngram"]',
    "text: a text": '"ngram"',
    "text: 5": "5",
    "text: 2": "2",
    "text: half of JSON": '{"a":',
    "text: a key twice": '{"shape":"tree","shape":"chain"}',
    "text: not a number": '{"history":{"decay":NaN}}',
    "text: 100,000 deep": '{"a":' * 100_000,
    "text: 5,000 digits": '{"max_draft_tokens":' + "9" * 5000 + "}",
    "text: a folder": "TMP",
    "text: a file that is not there": "TMP/none.json",
    "text: a device": "/dev/null",
    "text: null": "null",
    "text: a file that is no text": "TMP/binary",
    "a number": 3,
    "not a number, alone": NAN,
    "a list": [1],
    "bytes": b"{}",
    "an object": object(),
    "numpy's bool": np.bool_(True),
    "numpy's number": {"max_draft_tokens": np.int64(8)},
    "a tuple": (),
    "nothing in it": {},
    "the class": SpecRolloutConfig,
    "a key of a million characters": {"k" * 10**6: 1},
    "a value of a million characters": {"shape": "s" * 10**6},
    "a list of a million": {"drafters": ["ngram"] * 10**6},
    "a path of a million characters": {"history": {"dir": "d" * 10**6}},
    "nobody's home": {"history": {"dir": "~nobody-of-this-name/hist"}},
    "decoupled: set and not on": {"decoupled": {"window": 8}},
}
REQUEST = {
    "a typo": {"problem": "a"},
    "problem_id: a number": {"problem_id": 7},
    "problem_id: empty": {"problem_id": ""},
    "problem_id: 256 characters": {"problem_id": "x" * 256},
    "problem_id: a million characters": {"problem_id": "x" * 10**6},
    "problem_id: NUL": {"problem_id": "a\0b"},
    "problem_id: half a character": {"problem_id": "\ud800"},
    "problem_id: a path": {"problem_id": "../../etc/passwd"},
    "problem_id: null": {"problem_id": None},
    "tokens: below zero": {"max_draft_tokens": -1},
    "tokens: 65": {"max_draft_tokens": 65},
    "tokens: a fraction": {"max_draft_tokens": 8.0},
    "enabled: a number": {"enabled": 1},
    "text": '{"enabled":false}',
    "text: half of JSON": "{",
    "text: 100,000 deep": "[" * 100_000,
    "text: 5,000 digits": '{"max_draft_tokens":' + "9" * 5000 + "}",
    "text: a text": '"x"',
    "text: null": "null",
    "text: a key twice": '{"enabled":true,"enabled":false}',
    "a number": 3,
    "a list": [],
    "not a number": NAN,
    "true": True,
    "an unknown key of a million characters": {"k" * 10**6: 1},
    "ten unknown keys": {str(i): i for i in range(10)},
}


def _with(folder: Path, value):
    """The value, with the folder in the place of TMP."""
    if isinstance(value, str):
        return re.sub("^TMP", str(folder), value)
    return {k: _with(folder, v) for k, v in value.items()} if isinstance(value, dict) else value


def _outcomes(cases, read) -> str:
    parts = []
    for title, value in cases.items():
        try:
            said = f"accepted: {read(value)}"
        except ConfigError as error:
            assert error.cause and error.hint and len(str(error)) <= MOST_CHARACTERS, title
            said = f"error: {error}"
        parts.append(f"## {title}\n{said}\n")
    return "\n".join(parts)


def _set(given, defaults) -> str:
    differ = {key: value for key, value in given.items() if value != defaults[key]}
    return json.dumps(differ) if differ else "the defaults"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff")
    return tmp_path


def test_a_bad_configuration_is_refused_in_one_message(recorded, folder):
    def read(value):
        config = parse(_with(folder, value), "--spec-rollout")
        assert config is not None
        check_places(config)
        return _set(config.as_dict(), SpecRolloutConfig().as_dict())

    said = re.sub(r"at 0x[0-9a-f]+", "at 0x0", _outcomes(ENGINE, read).replace(str(folder), "TMP"))
    assert said == recorded(HERE.parent / "refusals" / "bad_configs.txt", said)
    assert sorted(path.name for path in folder.iterdir()) == ["binary", "file", "hist"]


def test_a_bad_request_is_refused_in_one_message(recorded):
    said = _outcomes(REQUEST, lambda value: _set(asdict(parse_request(value)), asdict(RequestOptions())))
    assert said == recorded(HERE.parent / "refusals" / "bad_requests.txt", said)


@pytest.mark.parametrize(
    "url, cause",
    [
        ("tcp://h:1", "`history.dir` is not"),
        ("tcp://h:1/" + "ab" * 32, "a key has no place in an address"),
        ("tcp://0.0.0.0:1", "says where it listens and not where it is"),
        ("tcp://*:1", "says where it listens and not where it is"),
        ("http://h:1", "`history.url` is"),
    ],
)
def test_an_url_that_no_engine_can_use_is_an_error(url: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as error:
        SpecRolloutConfig(history=HistoryConfig(url=url))
    assert "abab" not in str(error.value)
