"""Names of models: local paths, downloads and the default model."""
