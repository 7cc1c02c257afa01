"""Model architectures, written over backend-independent ops."""
