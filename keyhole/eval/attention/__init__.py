"""What sparse attention loses, layer by layer, on real text: `keyhole eval --suite attention`.

Text is fed token by token (teacher forcing) through decode steps of the dense model. In every layer
and step, each policy selects what it would read, and attention over this selection is compared with
full attention:

    dense_run   forces texts; weights, output and what each policy would read, step by step
    sums        means over steps: losses of policies, overlap of layers, repetition between steps
    suite       all cells, on the model and on its random twin, and the file of their lines
    tables      the stored lines as tables, with intervals and verdicts
    pictures    curves, and a page of tables and curves
"""
