"""What every room may import: configuration, errors, files, and the daemon's protocol."""
