"""Studies in virtual time; no process starts and nothing is timed.

workload     texts for which it is decided in advance where the draft is right; decodes them by one method
estimate     speed-ups with 95% intervals
compare      all methods on one workload
checks       closed forms against the simulator
rejections   rejections and bias of the rules, on Markov chains and on a pair of models
sweeps       speed along an axis: acceptance and speed ratio, jitter, message delay
stops        stop policies on recorded texts; trains the classifier of policy disco
texts        records a pair's texts, and decodes them by all methods
recorded     makes a workload of a trace
guessing     replays n-gram and datastore guesses on generated texts
mjgd         joint greedy decoding
plots        pictures (PNG)
"""
