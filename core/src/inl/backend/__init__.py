"""Backend interface, the NumPy reference backend and a backend made of functions."""
