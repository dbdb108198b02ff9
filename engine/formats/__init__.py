"""Files: models in GGUF, quantized tensors, profiles, traces."""
