"""OpenTelemetry traces. Without `otlp_traces_endpoint`, only `start` is imported."""
