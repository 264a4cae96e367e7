"""An event-driven simulator of rollouts on a cluster, and the published figures it is held against.

What belongs here: the model (`step_line`, `lengths`, `acceptance`, `replica`, `rollout`), the inputs of each study with
where each value comes from (`inputs/*.toml`), and the studies that print our figures beside the papers'.
"""
