"""Measures `keyhole serve`: the cost of HTTP (overhead), many requests (soak), Ray replicas."""
