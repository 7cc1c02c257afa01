"""The peers of the CPU backend, and how each is installed, fed, run and compared."""
