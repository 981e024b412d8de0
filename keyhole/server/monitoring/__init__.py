"""How a server is seen from outside.

logs.py        a line for each request, as text or JSON
metrics.py     /metrics for Prometheus
collectors.py  the metrics that are computed when they are read: the engine's state, documents, gaps
traces.py      a trace for each request, for OpenTelemetry
"""
