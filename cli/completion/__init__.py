"""Scripts that make a shell complete commands, flags and values, made from the commands' own parsers."""
