"""Drafters: propose the next tokens of running requests."""
