"""What `python -m hvdlite doctor` does.

Every rank collects facts (facts.py); hosts measure the way to one another (network.py) and ranks their shared memory
(memory.py); what is wrong with all of that is found by functions of facts alone (findings.py), and printed (report.py).
One machine: machine.py. The ranks of a job: job.py.
"""
