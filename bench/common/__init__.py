"""What the engine and the rollout benchmark share: engine processes, flags, rows, reports."""
