import gzip
import json
import threading
import time
from pathlib import Path

import pytest
import uvicorn
import zstandard
from typer.testing import CliRunner

from tests.unit.report.pages import islands
from tests.unit.server.conftest import FakeEngine, wired
from vllm_specrollout.cli import report
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError, SpecRolloutError

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "tests" / "traces" / "long_tail.jsonl.zst"


def run(*arguments):
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_page_and_tracks_are_written_for_their_owner_alone(tmp_path):
    page, tracks = tmp_path / "x.html", tmp_path / "x.json"
    said = run(TRACE, "--out", page, "--perfetto", tracks).splitlines()
    assert [line.split(" (")[0] for line in said] == [f"wrote {page}", page.as_uri(), f"wrote {tracks}"]
    assert islands(page.read_text())["summary"]["file"] == TRACE.name
    assert json.loads(tracks.read_text())["traceEvents"]
    assert {path.stat().st_mode & 0o777 for path in (page, tracks)} == {0o600}


def test_without_a_name_the_page_lies_beside_the_record_and_is_told_as_an_address(tmp_path):
    trace = tmp_path / "run 3.jsonl.zst"
    trace.write_bytes(TRACE.read_bytes())
    page = tmp_path / "run 3.html"
    _, address = run(trace).splitlines()
    assert address == f"file://{tmp_path}/run%203.html" and islands(page.read_text())["summary"]["file"] == trace.name


@pytest.mark.parametrize(
    ("flags", "is_terminal", "screen", "is_opened"),
    [
        ((), True, ":0", True),
        ((), False, ":0", False),
        ((), True, "", False),
        (("--open",), False, "", True),
        (("--no-open",), True, ":0", False),
    ],
)
def test_the_page_opens_where_somebody_sits_or_as_the_flag_says(
    tmp_path, monkeypatch, flags, is_terminal, screen, is_opened
):
    opened = []
    monkeypatch.setattr(report.webbrowser, "open", opened.append)
    monkeypatch.setattr(report, "page_of", lambda *_: "")
    monkeypatch.setattr(report, "_is_terminal", lambda: is_terminal)
    for name, value in (("DISPLAY", screen), ("WAYLAND_DISPLAY", "")):
        monkeypatch.setenv(name, value)
    page = tmp_path / "x.html"
    run(TRACE, "--out", page, *flags)
    assert opened == ([page.as_uri()] if is_opened else [])


def test_a_page_is_no_larger_than_it_may_be(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(report, "page_of", lambda trace, name, most, text_of: seen.append(most) or "")
    run(TRACE, "--out", tmp_path / "x.html", "--most-mb", "7")
    assert seen == [7_000_000]


def test_tokens_have_their_text_where_the_models_folder_is_named(tmp_path):
    page = tmp_path / "x.html"
    run(TRACE, "--out", page, "--tokenizer", ROOT / "packages" / "policy" / "checkpoint")
    data = islands(page.read_text())
    tokens = {token for name, block in data.items() if name.startswith("trees") for token in block["answers"]}
    assert data["words"]["263"] == " +" and tokens <= {int(token) for token in data["words"]}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="whose tokenizer.json cannot be read"):
        run(TRACE, "--out", tmp_path / "x.html", "--tokenizer", tmp_path)


def test_a_file_that_cannot_be_drawn_leaves_no_page(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b"not a trace\n")
    with pytest.raises(SpecRolloutError, match="is not a trace: its first line is no header"):
        run(tmp_path / "t.jsonl", "--out", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_a_file_that_stops_in_the_middle_is_drawn_as_far_as_it_goes(tmp_path):
    content = zstandard.ZstdDecompressor().stream_reader(TRACE.read_bytes()).read()
    path, out = tmp_path / "t.jsonl.gz", tmp_path / "x.html"
    path.write_bytes(gzip.compress(content[: len(content) // 2])[:-40])
    run(path, "--out", out)
    summary = islands(out.read_text())["summary"]
    assert summary["is_cut"] and "no end" in summary["requests"]["statuses"]


@pytest.fixture
def server(request):
    """A server whose engine has the settings that are asked for."""
    settings = request.param
    engine = FakeEngine(set(), settings)
    own = uvicorn.Server(uvicorn.Config(wired(engine), port=0, log_level="error"))
    thread = threading.Thread(target=own.run, daemon=True)
    thread.start()
    while not own.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{own.servers[0].sockets[0].getsockname()[1]}"
    own.should_exit = True
    thread.join()


RECORDING = {"drafters": ["ngram"], "record": str(TRACE)}


@pytest.mark.parametrize("server", [RECORDING], indirect=True)
def test_what_a_server_has_recorded_is_drawn_by_its_address(server, tmp_path):
    page = tmp_path / "x.html"
    run(server + "/", "--out", page)
    run(TRACE, "--out", tmp_path / "y.html")
    found, wanted = (islands(path.read_text())["summary"] for path in (page, tmp_path / "y.html"))
    assert {**found, "file": ""} == {**wanted, "file": ""}


@pytest.mark.parametrize(
    ("server", "cause"),
    [
        ({"drafters": ["ngram"]}, "records no rollout"),
        ({}, "spec rollout is off"),
        (RECORDING | {"record": "/no"}, "no recording of engine 0"),
    ],
    indirect=["server"],
)
def test_a_server_that_has_no_recording_says_why(server, cause, tmp_path):
    with pytest.raises(ConfigError, match=f"gives no recording: .*{cause}") as error:
        run(server, "--out", tmp_path / "x.html")
    assert '{"record": "FILE"}' in error.value.hint


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--out", "/"), "`--out` is `/`, which is a folder"),
        (("--out", "no/x.html"), "`--out` is `no/x.html`, whose folder does not exist"),
        (("--perfetto", "no/x.json"), "`--perfetto` is `no/x.json`, whose folder does not exist"),
        (("--out", "x.html", "--most-mb", "0"), "`--most-mb` is 0, outside 1 to 1000"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_read(arguments, cause):
    with pytest.raises(ConfigError) as error:
        run(TRACE, *arguments)
    assert error.value.cause == cause
    # what is missing comes first
    with pytest.raises(ConfigError, match="`no such trace` cannot be read: No such file"):
        run("no such trace", *arguments)
