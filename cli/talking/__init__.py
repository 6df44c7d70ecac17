"""Talking with a model from the command line: a server's, or one that is loaded for it."""
