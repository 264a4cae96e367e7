"""Observers of a step, and failures of ours. Listeners of the speculator; they change nothing of a step."""
