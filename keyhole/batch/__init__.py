"""Files of requests in OpenAI's batch format, each line answered exactly once: `keyhole batch`.

    lines.py    lines of the input: identity, checks, shards
    output.py   the output file: what it has, a repaired end, what is added
    answer.py   lines to the server's application, several at a time
    run.py      a whole file

A line is answered by the application of `keyhole serve`, without a socket, so that answers and
errors are the server's. Needs the extra `keyhole[serve]`.
"""
