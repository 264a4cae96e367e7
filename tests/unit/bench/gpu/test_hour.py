"""The hour on a GPU, with commands that are a few lines of Python: what ends how, and what is begun again."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import commands, hour, machine
from bench.gpu.commands import Job, Options
from tests.unit.bench.runner.fake_engines import invoke
from vllm_specrollout.cli.commands import BENCHES
from vllm_specrollout.errors import SpecRolloutError

ROOT = Path(__file__).resolve().parents[4]
# `bench WORD ... --out FILE`: what the word says, and a count of how often it was begun
FAKE = """
import json, os, sys, time
word, report = sys.argv[2], sys.argv[-1]
with open(os.environ["BEGUN"], "a") as begun:
    print(word, file=begun)
print("table of", word)
print("log of", word, file=sys.stderr, flush=True)
if word == "hangs":
    time.sleep(1000)
if word == "dies":
    sys.exit(2)
open(report, "w").write(json.dumps({"rows": [{"name": word, "passed": word == "right"}]}))
sys.exit(word != "right")
"""


def job(word, limit_s=60.0, expected_s=0.0):
    return Job(step="checks", name=word, arguments=("bench", word), expected_s=expected_s, limit_s=limit_s)


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Run these commands: (exit status, what is on disk, the log)."""
    monkeypatch.setattr(hour, "_CLI", ["-c", FAKE])
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    out = tmp_path / "out"

    def run(*chosen, left_s=60.0):
        code = hour.Hour(out, is_dry=True).run(chosen, time.monotonic() + left_s)
        log = capsys.readouterr().out + (out / hour.LOG).read_text()
        return code, json.loads((out / hour.FILE).read_text())["runs"], log

    return run


def begun(tmp_path):
    return (tmp_path / "begun").read_text().split()


def test_what_tells_most_comes_first_and_engines_have_a_second_way():
    plan = commands.jobs(Options())
    assert [one.name for one in plan[:6]] == list(commands.MICRO)
    assert all(one.retry == ("--uncompiled",) for one in plan if one.arguments[:2] == ("bench", "device"))
    assert not any(one.retry for one in commands.jobs(Options(is_dry=True)))


def test_what_is_right_is_kept_and_not_run_again(start, tmp_path):
    code, (one,), log = start(job("right"))
    assert (code, one["state"], one["attempts"], one["report"]["rows"][0]["name"]) == (0, "done", 1, "right")
    assert "table of right" in log and "log of right" in log
    assert start(job("right"))[0] == 0
    assert begun(tmp_path) == ["right"]


def test_what_says_that_it_is_wrong_is_kept_as_wrong(start, tmp_path):
    code, runs, _ = start(job("wrong"), job("right"))
    assert (code, [one["state"] for one in runs]) == (hour.WRONG, ["wrong", "done"])
    start(job("wrong"))
    assert begun(tmp_path) == ["wrong", "right"]


def test_what_dies_is_begun_twice_the_second_time_with_further_words_and_the_others_run(start, tmp_path):
    dies = replace(job("dies"), retry=("--uncompiled",))
    code, runs, log = start(dies, job("right"))
    assert (code, [(one["state"], one["attempts"]) for one in runs]) == (hour.WRONG, [("failed", 2), ("done", 1)])
    assert runs[0]["command"] == "specrollout bench dies" and log.count("--uncompiled") == 1
    assert runs[0]["error"] == "it ended with 2" and start(dies)[0] == hour.WRONG
    assert begun(tmp_path) == ["dies", "dies", "right"]


def test_what_hangs_is_ended_at_its_limit(start):
    code, (one,), _ = start(job("hangs", limit_s=0.5))
    assert (code, one["state"], one["attempts"]) == (hour.WRONG, "failed", 2)
    assert one["error"] == "no end within 0 s"


def test_nothing_is_begun_that_may_not_end_before_the_deadline(start, tmp_path):
    code, runs, log = start(job("right"), job("wrong", expected_s=1000.0))
    assert (code, len(runs)) == (hour.UNFINISHED, 1) and "left" in log
    assert start(job("wrong"))[0] == hour.WRONG
    assert begun(tmp_path) == ["right", "wrong"]


def test_what_is_cut_off_at_the_deadline_is_left_for_one_more_start(start):
    code, (one,), _ = start(job("hangs", expected_s=0.4), left_s=0.5)
    assert (code, one["state"], one["attempts"]) == (hour.UNFINISHED, "begun", 1)
    assert start(job("hangs", limit_s=0.2))[0] == hour.WRONG


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--steps", "checks,lunch"], "`--steps` is 'lunch', which does not exist"),
        (["--models", "70B"], "`--models` is '70B', which does not exist"),
        (["--arms", "bush"], "`--arms` is 'bush', which does not exist"),
    ],
)
def test_bad_flags_are_one_clear_error_and_leave_nothing_behind(tmp_path, arguments, cause):
    error = invoke(hour.bench_gpu, "--out", tmp_path / "out", "--dry", *arguments).exception
    assert isinstance(error, SpecRolloutError) and error.cause == cause
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_nothing_but_the_dry_walk_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": None})
    error = invoke(hour.bench_gpu, "--out", tmp_path / "out").exception
    assert isinstance(error, SpecRolloutError) and error.cause.startswith("no NVIDIA GPU can be seen")


def test_the_parent_needs_neither_torch_nor_vllm():
    code = "import sys, bench.gpu.hour; print({'torch', 'vllm', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("is_dry", [False, True])
def test_every_step_is_made_of_benchmarks_and_no_two_commands_are_alike(is_dry):
    made = commands.jobs(Options(is_dry=is_dry))
    assert list(dict.fromkeys(one.step for one in made)) == list(commands.STEPS)
    assert len({one.arguments for one in made}) == len({one.title for one in made}) == len(made)
    assert {one.arguments[1] for one in made if one.arguments[0] == "bench"} <= set(BENCHES)
    assert all(one.expected_s < one.limit_s for one in made)


def test_arms_that_are_not_asked_for_start_no_engines():
    for arm, other in (("tree", "chain"), ("chain", "tree")):
        made = commands.jobs(Options(arms=(arm,)))
        # trees may round apart, so nothing of them is strict
        assert {one.step for one in made} == set(commands.STEPS) - ({"strict"} if arm == "tree" else set())
        assert not [one for one in made if other in ",".join(one.arguments).split(",")]
