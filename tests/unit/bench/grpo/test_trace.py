"""Traces of an RL loop, written and read."""

from bench.grpo.trace import read_rollouts, write_rollout


def test_a_trace_reads_back_as_it_was_written_in_the_order_of_steps(tmp_path):
    lines = [{"step": step, "token_ids": [1, 2, step]} for step in range(12)]
    for line in reversed(lines):
        write_rollout(tmp_path, line["step"], [line])
    assert list(read_rollouts(tmp_path)) == [{"schema": 1, **line} for line in lines]


def test_equal_rollouts_give_equal_files(tmp_path):
    one, other = (write_rollout(tmp_path / name, 0, [{"step": 0}]) for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
