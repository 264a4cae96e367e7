"""What watches a step: metrics, timeline, recorder. Listeners of the speculator; they change nothing of a step."""
