"""Backends: one module each. `cpu` is always there."""
