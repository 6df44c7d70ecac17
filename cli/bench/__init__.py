"""`octavo bench offline`: measures the engine in its own process."""
