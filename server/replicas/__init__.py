"""The service as replicas of a Ray Serve deployment (`octavo[ray]`): Serve carries it, instead of a server of its own.

`application` is what Serve runs, `router` and `scaling` what Serve asks; those three need Ray. The rest does not.
"""
