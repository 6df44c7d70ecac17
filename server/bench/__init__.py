"""`octavo bench serve`: measures any OpenAI-compatible server from the outside.

Nothing here knows the engine; all that is known about the server comes over HTTP.
"""
