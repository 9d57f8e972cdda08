"""hvdlite inside training libraries, one module per library; see docs/integrations.md.

Nothing here is imported unless it is asked for by name, and each module imports its library.
"""
