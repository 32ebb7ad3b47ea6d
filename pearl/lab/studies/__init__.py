"""Studies: the papers' tables and figures, filled by real runs, and experiments in virtual time.

pearl, emulate   the pairs of the PEARL paper, emulated, with the tables as data
tables           tables of other papers, filled with existing rules and methods (`studies.yaml`)
lengths, chains, sssd, mjgd, energy   one paper or question each
workload         texts for which it is fixed which draft tokens are right, decoded in virtual time
recorded_texts   records a target's texts, and the token that the draft draws at each position
stops            compares stop policies on recorded texts; trains the classifier of policy disco
guessing         replays n-gram and datastore guesses on generated texts
estimate         means, ratios and medians with 95% intervals
simulate         runs the coordinator and the draft under a virtual clock
theory           the papers' closed forms
"""
