"""What `import horovod` finds in a process that has only sys.path from the one that asked for hvdlite in its place."""

import hvdlite.compat.horovod  # noqa: F401 (puts a mirror where this module stands in sys.modules)
