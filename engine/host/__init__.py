"""This process and its machine: logs, folders, CPUs, GPUs, its container."""
