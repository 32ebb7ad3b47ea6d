"""Tables of the papers, filled by real runs on this machine, with the tables as data.

`pearl` emulates its pairs; `studies` are of the embedded pair, run by `study`.  Simulated tables and figures are in
`pearl.lab.experiments`.
"""
