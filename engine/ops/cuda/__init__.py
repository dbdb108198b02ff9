"""The CUDA backend: `ops` has the signatures of the reference backend; the other modules are what it launches."""
