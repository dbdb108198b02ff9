"""What lies where: the cache and its prefixes, slots of experts, and the slow tier."""
