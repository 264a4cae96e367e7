"""Heads that draft, trained on what the target computed in rollouts.

What belongs here: the buffer on disk between engine and trainer, packing, the trainer and its checkpoints. The engine
fills the buffer (`worker/v1/collecting.py`) and loads the head; nothing here knows vLLM.
"""
