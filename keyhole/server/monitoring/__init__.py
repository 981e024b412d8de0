"""Logs, metrics and traces of a server.

logs.py        a line per request, as text or JSON
metrics.py     /metrics for Prometheus
collectors.py  metrics computed when they are read: the engine's state, documents, gaps
traces.py      a trace per request, for OpenTelemetry
"""
