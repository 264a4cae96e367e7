"""What watches a step: metrics, timeline, recorder. Listeners of the speculator, which change nothing of what it does."""
