"""The common parts of all commands: parsers of arguments, near names, and output in a terminal and in a pipe."""
