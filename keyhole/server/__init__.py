"""An HTTP server in front of an engine, for any OpenAI client: `keyhole serve`.

    app.py         the application: its routes and error handlers
    bodies.py      the fields of requests
    answers.py     the fields of answers
    completions.py /v1/chat/completions and /v1/completions
    chat/          chat templates, tool calls, reasoning, grammars of replies
    responses.py   /v1/responses
    documents/     /v1/documents, and the passages that answers used
    errors.py      every error as OpenAI's error object
    gate.py        API keys, the size of bodies, an id for every request
    state.py       what requests share: engine, limits, metrics, documents
    logs.py        a line of the log, and a trace, for every request
    metrics.py     /metrics for Prometheus
    page/          the page at /
    run.py         runs the application with uvicorn, in two processes (two_processes.py)
    settings.py    address, access and limits

Needs the extra `keyhole[serve]`.
"""
