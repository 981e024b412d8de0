"""Logs, metrics and traces of a server.

logs.py     a line per request, as text or JSON
metrics.py  /metrics for Prometheus
traces.py   a trace per request, for OpenTelemetry
"""
