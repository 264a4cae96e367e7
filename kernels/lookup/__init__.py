"""Looks drafts up in texts that lie on the device: earlier answers, siblings, and what a request has written itself."""
