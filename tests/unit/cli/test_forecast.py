"""`specrollout try --from RECORD`."""

import json

import pytest
from typer.testing import CliRunner

from tests.unit.replay.test_dump import GRPO, TRACE
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError

COLUMNS = {
    "steps", "epoch", "num_answers", "num_tokens", "plain_ms", "plain_steps", "ours_ms", "ours_steps",
    "tokens_per_step", "drafted", "accepted", "speedup",
}  # fmt: skip


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["try", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_rollout_that_is_over_is_told_at_every_anchor_without_an_engine(tmp_path) -> None:
    out = tmp_path / "rows.json"
    text = run("--from", GRPO[0], "--batch", "16", "--out", out)
    rows = json.loads(out.read_text())
    assert [row["steps"] for row in rows] == ["h200-7b", "h200-7b-first"]
    assert all(set(row) == COLUMNS for row in rows)
    assert "Nothing was run: all times are predicted" in text
    for row in rows:
        assert f"{row['plain_steps']} -> {row['ours_steps']}" in text and f"{row['speedup']:.2f}x" in text
    assert "which no GPU has run" in text and "measured with an earlier design" in text


def test_steps_may_be_an_anchors_or_those_of_a_trace(tmp_path) -> None:
    out = tmp_path / "rows.json"
    run(
        f"--from={GRPO[0]}", "--steps", TRACE, "--steps", "h200-7b", "--out", out, "--spec-rollout", '{"budget": "off"}'
    )
    assert [row["steps"] for row in json.loads(out.read_text())] == [TRACE.name, "h200-7b"]
    assert all(row["speedup"] == 1.0 and row["drafted"] == 0 for row in json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--batch", "0"], "`--batch` is 0"),
        (["--spec-rollout", '{"drafter": []}'], "drafter"),
        (["--steps", "h100"], "`--steps` is 'h100'"),
        (["--out", "none/rows.json"], "whose folder does not exist"),
    ],
)
def test_wrong_flags_are_refused(more, words) -> None:
    with pytest.raises(ConfigError, match=words):
        run("--from", GRPO[0], *more)
