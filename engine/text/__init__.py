"""Text before and after the engine: tokenizers, stop strings, incremental detokenisation."""
