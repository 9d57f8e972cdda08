"""What `python -m hvdlite doctor` does.

Every rank collects facts (facts.py); each host has a station (station.py), to which others measure the way
(network.py), and ranks measure their shared memory (memory.py); what is wrong with all of that is found by functions
of facts alone (findings.py), and printed (report.py).
One machine: machine.py. The ranks of a job: job.py.
"""
