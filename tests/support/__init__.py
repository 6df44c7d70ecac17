"""Shared by the tests: tiny checkpoints, the reference implementation, and ways to drive an engine."""
