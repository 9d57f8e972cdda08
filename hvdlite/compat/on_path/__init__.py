"""Not a package: a directory for sys.path; see `hvdlite.compat.horovod.search_path`."""
