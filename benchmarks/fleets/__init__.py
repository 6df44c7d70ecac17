"""Parts of `benchmarks/fleet.py`."""
