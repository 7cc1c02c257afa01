"""DirectML and other providers of ONNX Runtime as devices of INL."""
