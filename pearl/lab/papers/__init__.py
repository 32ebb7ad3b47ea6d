"""Tables of the papers, filled by real runs on this machine: one module per paper, with its tables as data.

`pearl` emulates its pairs; the others are studies of the embedded pair, see `study`.  Simulated tables and figures are
in `pearl.lab.experiments`.
"""

STUDIES = ("theory", "disco", "sssd", "mjsd")  # modules with a `STUDY`; importing them takes torch
