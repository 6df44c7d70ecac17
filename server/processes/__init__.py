"""Several processes that answer HTTP beside one engine, and the one that starts them and counts for all."""
