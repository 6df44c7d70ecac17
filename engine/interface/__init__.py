"""What callers hand to an engine and get back: requests, outputs, `LLM`."""
