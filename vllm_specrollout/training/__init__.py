"""Heads that draft, trained on what the target computed for finished answers.

What belongs here: the answers and their rows on the way from an engine, the learner and how it judges, and runs by
hand. An engine loads the head; nothing here knows vLLM.
"""
