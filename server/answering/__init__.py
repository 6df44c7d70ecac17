"""The way from prompts to answers, whole or streamed."""
