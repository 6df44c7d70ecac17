"""The computation of attention: the interface in `base`, one module per backend in its room, chosen by `selection`."""
