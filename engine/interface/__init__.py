"""The types that callers pass to an engine and get back: requests, outputs, `LLM`."""
