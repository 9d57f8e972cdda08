"""Sockets between processes of a job: who is at the other end, over which interface, and how well it goes."""
