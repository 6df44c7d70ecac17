"""The computation of attention: the interface in `base`, one module per backend in its own package, and the choice in
`selection`."""
