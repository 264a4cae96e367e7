"""Many engines on many devices: what belongs here is planning and simulating them, without an engine."""
