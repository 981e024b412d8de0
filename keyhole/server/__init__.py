"""An HTTP server in front of an engine, for any OpenAI client: `keyhole serve`.

    app.py         the application: routes, limits, keys
    bodies.py      what requests may say
    answers.py     what answers say
    completions.py /v1/chat/completions and /v1/completions
    chat/          chat templates, calls of tools, reasoning, what a reply must follow
    responses/     /v1/responses
    documents/     /v1/documents, and what answers took from documents
    errors.py      every error as OpenAI's error object
    gate.py        API keys, the size of bodies, an id for every request
    limits.py      how many requests may wait
    monitoring/    log, metrics and traces
    run.py         uvicorn around it

Needs the extra `keyhole[serve]`.
"""
