"""The offline pipeline of Spark, its HTTP server and its command line."""

from importlib import metadata

try:
    __version__ = metadata.version("spark-moe")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
