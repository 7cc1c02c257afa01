"""Base of ONNX Runtime backends: graph values, kernels, and exported programs."""
