"""`specrollout bench rollout`: one RL rollout of the real policy, with and without drafts."""
