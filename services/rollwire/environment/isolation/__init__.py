"""Environments in processes of their own: what they do to themselves, they do to nobody else."""
