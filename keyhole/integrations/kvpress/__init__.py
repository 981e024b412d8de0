"""kvpress's compressors on Keyhole's tasks: SnapKV, TOVA and others, not written again.

A press looks at a prompt's keys and values once, after a dense prefill, and drops all but a budget
of them for good; Keyhole's policies keep everything and choose anew in every step. Both stand in
lines of the same form:

    python -m keyhole.integrations.kvpress MODEL --presses snapkv,tova --budgets 128,256

presses      the table of presses, and how a budget becomes a press
answer       a model of transformers that answers from what a press left
evaluation   a cell of the grid as a line, as `keyhole eval` writes it
"""
