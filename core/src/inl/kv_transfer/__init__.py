"""Contents of blocks that go to another engine: cut to its blocks, over TCP or TLS."""
