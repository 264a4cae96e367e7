"""`vllm serve --spec-rollout` from outside: answers, refusals, metrics, and how a bad start ends."""

import subprocess

import pytest

from tests.integration.serving import VLLM, ask, counters, environment, serve


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """The address of a running server."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    # `auto` may leave drafting where the host is slow, and what is drafted is counted here
    flags = ("--spec-rollout", "--spec-rollout.budget", "fixed", "--max-model-len", "256")
    # one answer at a time, and with other rows than without drafts
    flags += ("--per-request-spec-decode-metrics", "summary", "--dtype", "float32")
    with serve(str(model), log, *flags, is_warm=False) as address:
        yield address


def complete(server, **options):
    body = {"model": "tiny", "prompt": "1 2 3 1 2 3 1 2", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    return ask(server, "/v1/completions", {**body, **options})


def test_drafts_are_counted_and_do_not_change_the_answer(server):
    status, drafted = complete(server)
    assert status == 200
    before = counters(server)
    assert before["num_drafts"] > 0 and before["num_draft_tokens"] >= before["num_accepted_tokens"]
    of_request = drafted["metrics"]["speculative_decoding"]
    assert of_request["num_draft_tokens"] == before["num_draft_tokens"]
    assert of_request["num_accepted_draft_tokens"] == before["num_accepted_tokens"]
    assert of_request["num_spec_steps"] == before["num_drafts"]
    status, plain = complete(server, vllm_xargs={"spec_rollout": '{"enabled": false}'})
    assert status == 200 and counters(server) == before
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]


def test_wrong_options_are_answered_with_400_and_the_server_goes_on(server):
    status, answer = complete(server, vllm_xargs={"spec_rollout": '{"problem": "aime-7"}'})
    assert status == 400
    assert answer["error"]["message"] == (
        "unknown key `problem` in `extra_args['spec_rollout']`\n\nhint: did you mean `problem_id`?"
    )
    assert complete(server, max_tokens=4)[0] == 200


@pytest.mark.nightly
def test_a_start_that_is_refused_ends_in_the_message_and_status_2(model):
    command = [VLLM, "serve", model, "--spec-rollout", "--pipeline-parallel-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert "error: `--pipeline-parallel-size` is 2; spec rollout supports 1\n\nhint: use" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
