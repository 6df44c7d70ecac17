"""`octavo bench serve`: measures any OpenAI-compatible server from the outside.

But for `offline`, which measures the engine in its own process, nothing here knows the engine: all that is known about
a server comes over HTTP.
"""
