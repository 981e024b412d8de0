"""What sparse attention loses, layer by layer, on real text: `keyhole eval --suite attention`.

A text is forced through decode steps of the dense model. In every layer and step each policy says
what it would read, and its attention over that is compared with full attention:

    candidates    the policies of a dense run: their hooks are called, and none decides anything
    retained      the pages that an evicting policy would still have
    dense_run     forces texts; gives weights, output and what each policy would read, step by step
    measures      mass kept, relative error of the output, overlap
    loss          means over steps, for a policy and its controls
    overlap       top pages and tokens of a layer, found again in other layers
    repeats       a selection, found again in later steps
    random_twin   the same architecture with random weights, measured beside every model
    texts         what is forced
    cells         what is measured
    measuring     one cell
    suite         all cells, and the file that their lines go to
    report/       tables, curves and a page of the stored lines
"""
