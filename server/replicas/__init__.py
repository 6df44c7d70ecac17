"""The service as replicas of a Ray Serve deployment (`octavo[ray]`): Serve carries it, instead of a server of its own.

Serve runs `application` and calls `router` and `scaling`. These three modules need Ray. The rest does not.
"""
