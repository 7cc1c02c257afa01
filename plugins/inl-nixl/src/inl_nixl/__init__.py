"""INL with NIXL: the transport ``nixl`` of cached contents between engines."""
