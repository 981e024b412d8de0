"""Files of requests in OpenAI's batch format, each line answered exactly once: `keyhole batch`.

    files.py    lines of the input: their ids, checks, shards; the output, which is only appended to
    run.py      runs a whole file: sends lines to the server's application, several at a time

The application of `keyhole serve` answers each line, without a socket, so answers and errors are
the same as the server's. Needs the extra `keyhole[serve]`.
"""
