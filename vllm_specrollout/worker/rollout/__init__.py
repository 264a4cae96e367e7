"""A worker of a group: one engine in a process of its own, driven by messages."""
