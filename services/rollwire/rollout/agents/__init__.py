"""Agents that keep their own loop: policy sessions, the record of their calls, and the HTTP edge that they speak to."""
