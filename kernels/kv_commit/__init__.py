"""Moves the keys and values of accepted nodes into consecutive slots, in all layers at once."""
