"""Requests in files that are answered when there is time: /v1/files and /v1/batches."""
