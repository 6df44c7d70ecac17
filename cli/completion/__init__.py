"""Scripts that make a shell complete commands, flags and values, generated from the commands' own parsers."""
