"""The offline pipeline of Spark, its HTTP server and its command line."""


def __getattr__(name: str) -> str:
    # Found when it is asked for: reading the metadata of a package takes longer than most of our imports.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("spark-moe")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
