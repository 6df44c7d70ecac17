"""The common parts of all commands: argument parsers, suggestions for names, and output for terminals and pipes."""
