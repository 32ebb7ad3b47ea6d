"""Studies: the papers' tables and figures, filled by real runs, and experiments in virtual time.

pearl, emulate   the pairs of the PEARL paper, emulated, with the tables as data
tables           tables of other papers that existing rules and methods fill (`studies.yaml`)
lengths, chains, sssd, mjgd, energy   one paper or question each
workload         texts for which it is decided in advance where the draft is right; decodes them by any method
recorded_texts   records a pair's texts
stops            stop policies on recorded texts; trains the classifier of policy disco
guessing         replays n-gram and datastore guesses on generated texts
estimate         means, ratios and medians with 95% intervals
simulate         the coordinator and the draft under a virtual clock
theory           what the papers say in closed form
"""
