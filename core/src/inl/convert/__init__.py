"""Writing of model files: quantized, and converted between GGUF and safetensors."""
