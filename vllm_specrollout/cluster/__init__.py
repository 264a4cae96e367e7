"""Drafters in processes of their own: messages, mailboxes, planning."""
