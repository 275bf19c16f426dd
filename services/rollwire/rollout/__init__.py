"""Rollout server: engines, prompts and the episode loop."""
