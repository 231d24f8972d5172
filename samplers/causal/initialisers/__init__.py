"""Tail initialisers: the first draft of a position that has just entered the window, and the
distribution it was drawn from.

    uniform       uniform over the legal ids, with the noise of the position; q = 1 / |legal|.
                  Acceptance 1 - TV(p, q)
    random        a uniform id taken as it is (q = one-hot); acceptance p(x), about 1 / V. The SJD
                  paper's default
    repeat        the token one position before (q = one-hot). The paper's ``repeat_horizon``
    repeat_above  the token one row above (q = one-hot), in grids of at least two axes
    model         a draft model continues the iterate, argmax log q + G with the noise G of the
                  position; q is the draft model's distribution
    table         counts of neighbouring tokens give q, argmax log q + G
    model_table   a draft model whose own Jacobi iterate begins with the table's

All of them are exact: what counts is that q is the distribution the draft came from. Those with the
noise of the position draft the very token of the target wherever q ranks it first as p does.
"""
