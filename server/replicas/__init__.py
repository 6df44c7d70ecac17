"""The service as replicas of a Ray Serve deployment (`octavo[ray]`): Serve answers HTTP instead of this project's own
server.

Serve runs `application` and calls `router` and `scaling`. These three modules need Ray. The others do not.
"""
