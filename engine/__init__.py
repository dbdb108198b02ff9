"""The inference engine of Spark and its daemon (`python -m engine MODEL.gguf`)."""
