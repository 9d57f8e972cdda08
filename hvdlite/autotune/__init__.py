"""Settings chosen by measured step time; docs/autotuning.md says how to use it.

settings.py has what may be tuned, search.py decides from step times, log.py writes it down, tuner.py does it in a job.
"""
