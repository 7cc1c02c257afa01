"""What a backend is tested with."""
