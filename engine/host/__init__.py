"""This process and its machine: logs, folders, processors, its container."""
