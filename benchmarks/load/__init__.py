"""A closed load over HTTP, from a client that costs little: what the measurements of the service share."""
