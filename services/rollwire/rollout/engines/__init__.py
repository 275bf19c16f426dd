"""Inference engines behind the `Engine` protocol."""
