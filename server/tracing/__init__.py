"""OpenTelemetry traces, for those who set `otlp_traces_endpoint`: nothing here is imported otherwise, but `start`."""
