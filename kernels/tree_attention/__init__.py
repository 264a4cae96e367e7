"""Paged attention in which the last rows of a request may be the nodes of a draft tree."""
