"""Rows of a step's drafts, laid out on the device from what was drafted there."""
