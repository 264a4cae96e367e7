"""Samples the target's own token at every node of the step's trees, and walks each tree down to the last match."""
