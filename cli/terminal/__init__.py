"""What all commands share: parsers of arguments, near names, and how output looks in a terminal and in a pipe."""
