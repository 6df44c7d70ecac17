"""Chats and completions from the command line, with a server's model or one loaded for the command."""
