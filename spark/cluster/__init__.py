"""Work that is spread over a cluster: a scheduler without a cluster in it, and Ray as one that it can have."""
