"""An HTTP server in front of an engine, for any OpenAI client: `keyhole serve`.

    app.py         the application: routes, limits, keys
    bodies.py      the fields of requests
    answers.py     the fields of answers
    completions.py /v1/chat/completions and /v1/completions
    chat/          chat templates, tool calls, reasoning, grammars of replies
    responses/     /v1/responses
    documents/     /v1/documents, and the passages that answers used
    errors.py      every error as OpenAI's error object
    gate.py        API keys, the size of bodies, an id for every request
    limits.py      how many requests may wait
    monitoring/    log, metrics and traces
    run.py         runs the application with uvicorn

Needs the extra `keyhole[serve]`.
"""
