"""Studies in virtual time; no process starts and nothing is timed.

workload     texts for which it is decided in advance where the draft is right; decodes them by any method
estimate     means, ratios and medians with 95% intervals
stops        stop policies on recorded texts; trains the classifier of policy disco
texts        records a pair's texts
guessing     replays n-gram and datastore guesses on generated texts
mjgd         joint greedy decoding
"""
