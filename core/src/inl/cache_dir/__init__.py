"""Files that INL keeps between runs."""
