"""The types that callers hand to an engine and get back: requests, outputs, `LLM`."""
