"""The store behind the `history` drafter: answers at rest on disk, indices on demand in memory."""
