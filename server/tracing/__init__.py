"""OpenTelemetry traces. Without `otlp_traces_endpoint` nothing here is imported but `start`."""
