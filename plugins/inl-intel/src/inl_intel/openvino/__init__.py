"""Models on OpenVINO's devices: one graph of all layers, the rest on the host."""
