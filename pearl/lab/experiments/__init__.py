"""What the simulator is asked: methods side by side, theory against simulation, sweeps and their pictures.

Many requests at a time, in virtual time.  Knows the simulator and the theory; no engine, no process, no real clock.
"""
