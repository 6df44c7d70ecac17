"""The command line: `octavo COMMAND`. It imports the server and the engine; neither imports it."""
