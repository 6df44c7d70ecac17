"""Several models behind one address: their states, their memory, and the choice of a model by a request's `model`."""
