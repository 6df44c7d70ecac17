"""Several processes that answer HTTP (fronts) beside one engine, and the process that starts them and keeps their
shared counts."""
