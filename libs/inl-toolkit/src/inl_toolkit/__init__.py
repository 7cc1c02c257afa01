"""Functions, kernels and small networks on arrays; ``inl`` re-exports its packages."""
