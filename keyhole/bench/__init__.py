"""What users measure on their own machine: `keyhole bench`.

    decode      time and memory of a decode step over a long cache, compared with transformers
    admission   the steps of other requests while a question over stored documents is admitted
    serve       load on a running server

All systems of a run take turns, in an order that rotates, and must agree before they are timed.
Every run adds a line to a file.
"""
