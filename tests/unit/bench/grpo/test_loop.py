"""What an RL loop says of its rewards."""

from bench.grpo.loop import reward_notes


def test_the_reader_learns_what_became_of_the_rewards():
    assert reward_notes([]) == []
    assert reward_notes([{"matched": 3, "unknown": 1}, {"matched": 4, "unknown": 0}]) == [
        "rewards reported to ours: 7 met their answer, 1 met none"
    ]
    assert "takes no rewards" in reward_notes([{"matched": 3}, None])[0]
