"""From prompts to answers, whole or streamed."""
